// Vectors of sixteen numbers (AVX512). `simd_avx2.h` has the same interface.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace eqquant {
namespace {

struct Avx512 {
  using Floats = __m512;
  using Ints = __m512i;
  static constexpr int64_t width = 16;
  static constexpr int64_t registers = 32;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats all(float x) { return _mm512_set1_ps(x); }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
  static Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
  static Floats sub(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
  static Floats mul(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
  static float sum(Floats x) { return _mm512_reduce_add_ps(x); }

  // A mask of the first `count` lanes. Masked loads give zeros in the other lanes.
  static __mmask16 first(int64_t count) {
    return static_cast<__mmask16>((1u << count) - 1);
  }
  static Floats load(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps(first(count), p);
  }
  static void store(float* p, Floats x, int64_t count) {
    _mm512_mask_storeu_ps(p, first(count), x);
  }

  static Floats only(Floats x, int64_t count) {
    return _mm512_maskz_mov_ps(first(count), x);
  }
  // A bit for each lane that is NaN.
  static uint32_t nans(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

  // Widens bytes to integers, with or without a sign.
  template <bool sign>
  static Ints widened(__m128i x) {
    return sign ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x);
  }
  template <bool sign>
  static Ints bytes(const uint8_t* p) {
    return widened<sign>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <bool sign>
  static Ints bytes(const uint8_t* p, int64_t count) {
    return widened<sign>(_mm_maskz_loadu_epi8(first(count), p));
  }
  template <int bits>
  static Ints right(Ints x) {
    return _mm512_srli_epi32(x, bits);
  }
  // For integers below 2**15.
  static Ints times(Ints x, int32_t y) {
    return _mm512_madd_epi16(x, _mm512_set1_epi32(y));
  }
  static Ints minus(Ints x, Ints y) { return _mm512_sub_epi32(x, y); }
  static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }

  // Lookups, which use the low four (or five) bits of an index and ignore the others.
  struct Table16 {
    __m512 entries;
    explicit Table16(const float* p) : entries(_mm512_loadu_ps(p)) {}
    Floats operator[](Ints i) const { return _mm512_permutexvar_ps(i, entries); }
  };
  struct Table32 {
    __m512 low, high;
    explicit Table32(const float* p)
        : low(_mm512_loadu_ps(p)), high(_mm512_loadu_ps(p + 16)) {}
    Floats operator[](Ints i) const { return _mm512_permutex2var_ps(low, i, high); }
  };

  // The scales of block `g` for `count` rows from row `i`.
  static Floats scales(const Weight& w, int64_t g, int64_t i, int64_t count) {
    __mmask16 mask = first(count);
    int64_t at = g * w.scale_columns + (w.scale_columns == 1 ? 0 : i);
    if (w.scale_columns == 1) mask = 1;
    __m512 found;
    if (w.scale_type == ScaleType::kFloat32) {
      found = _mm512_maskz_loadu_ps(mask, static_cast<const float*>(w.scale) + at);
    } else {
      __m256i half =
          _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(w.scale) + at);
      found =
          w.scale_type == ScaleType::kFloat16
              ? _mm512_cvtph_ps(half)
              : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    return w.scale_columns == 1 ? _mm512_broadcastss_ps(_mm512_castps512_ps128(found))
                                : found;
  }
};

}  // namespace
}  // namespace eqquant
