// Vectors of eight numbers, with products of integers (AVX2 and AVX_VNNI).
#pragma once

#include <immintrin.h>

#include "isa/avx2.h"

namespace eqquant {
namespace {

struct AvxVnni : Avx2 {
  static constexpr int small = 255;
  template <int most = 255>
  static Ints dot8(Ints sum, Ints x, Ints y) {
    return _mm256_dpbusd_avx_epi32(sum, x, y);
  }
  template <int most = 255>
  static void add_dot8(Ints& sum, Ints x, Ints y) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
  }
  static Ints add_bytes(Ints sum, Ints x) {
    return _mm256_dpbusd_avx_epi32(sum, x, _mm256_set1_epi8(1));
  }
  static Ints dot16(Ints sum, Ints x, Ints y) {
    return _mm256_dpwssd_avx_epi32(sum, x, y);
  }
  static void add_dot16(Ints& sum, Ints x, Ints y) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
  }
};

}  // namespace
}  // namespace eqquant
