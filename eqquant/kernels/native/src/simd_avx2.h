// Vectors of eight numbers (AVX2). `simd_avx512.h` has the same interface.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "byte_planes.h"
#include "kernels.h"

namespace eqquant {
namespace {

// Vectors of 32 bytes.
struct Bytes256 {
  using Vector = __m256i;
  static constexpr int64_t lanes = 32;
  static constexpr int together = 1;  // codes of a row, in a vector

  static Vector load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Vector load(const uint8_t* p, int64_t count) {
    uint8_t copy[32] = {};
    std::memcpy(copy, p, static_cast<size_t>(count));
    return load(copy);
  }
  static void store(uint8_t* p, Vector x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), x);
  }
  static Vector all(char x) { return _mm256_set1_epi8(x); }
  static Vector both(Vector x, char y) {
    return _mm256_and_si256(x, all(y));
  }
  static Vector either(Vector x, Vector y) { return _mm256_or_si256(x, y); }
  static Vector differing(Vector x, Vector y) { return _mm256_xor_si256(x, y); }
  static Vector minus(Vector x, Vector y) { return _mm256_sub_epi8(x, y); }
  // Shifts pairs of bytes: bits move into the neighbour.
  template <int bits>
  static Vector right(Vector x) {
    return _mm256_srli_epi16(x, bits);
  }
  template <int bits>
  static Vector left(Vector x) {
    return _mm256_slli_epi16(x, bits);
  }
  // A third of each byte, rounded down: `c * 171 >> 9`, which takes 16 bits, so that
  // even and odd bytes are divided apart.
  static Vector third(Vector c) {
    const Vector low = _mm256_set1_epi16(0xff), factor = _mm256_set1_epi16(171);
    const Vector even =
        _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_and_si256(c, low), factor), 9);
    const Vector odd =
        _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_srli_epi16(c, 8), factor), 9);
    return either(even, _mm256_slli_epi16(odd, 8));
  }
};

struct Avx2 {
  using Bytes = Bytes256;
  using Floats = __m256;
  using Ints = __m256i;
  static constexpr int64_t width = 8;
  static constexpr int64_t registers = 16;

  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats all(float x) { return _mm256_set1_ps(x); }
  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
  static Floats add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
  static Floats sub(Floats x, Floats y) { return _mm256_sub_ps(x, y); }
  static Floats mul(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
  // An approximation of `1 / x`.
  static Floats about_reciprocal(Floats x) { return _mm256_rcp_ps(x); }
  // The nearest integer from 0 to `most`; one of these for NaN, too.
  static Floats rounded(Floats x, float most) {
    const Floats inside = _mm256_max_ps(_mm256_min_ps(x, all(most)), zero());
    return _mm256_round_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static float sum(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // A mask of the first `count` lanes. Masked loads give zeros in the other lanes.
  static __m256i first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Floats load(const float* p, int64_t count) {
    return _mm256_maskload_ps(p, first(count));
  }
  static void store(float* p, Floats x, int64_t count) {
    _mm256_maskstore_ps(p, first(count), x);
  }

  static Floats only(Floats x, int64_t count) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(first(count)));
  }
  // A bit for each lane that is NaN.
  static uint32_t nans(Floats x) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }

  // Widens bytes to integers, with or without a sign.
  template <bool sign>
  static Ints bytes(const uint8_t* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return sign ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x);
  }
  template <bool sign>
  static Ints bytes(const uint8_t* p, int64_t count) {
    if (count == width) return bytes<sign>(p);
    uint8_t copy[8] = {};
    std::memcpy(copy, p, static_cast<size_t>(count));
    return bytes<sign>(copy);
  }
  template <int bits>
  static Ints right(Ints x) {
    return _mm256_srli_epi32(x, bits);
  }
  // For integers below 2**15.
  static Ints times(Ints x, int32_t y) {
    return _mm256_madd_epi16(x, _mm256_set1_epi32(y));
  }
  static Ints minus(Ints x, Ints y) { return _mm256_sub_epi32(x, y); }
  template <int bits>
  static Ints left(Ints x) {
    return _mm256_slli_epi32(x, bits);
  }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static Ints either(Ints x, Ints y) { return _mm256_or_si256(x, y); }
  static Ints both(Ints x, int32_t y) { return _mm256_and_si256(x, ints(y)); }
  // The lowest byte of each.
  static void store_bytes(uint8_t* p, Floats x) {
    const __m256i low = _mm256_shuffle_epi8(_mm256_cvtps_epi32(x),
                                            _mm256_set1_epi32(0x0c080400));
    const __m256i both =
        _mm256_permutevar8x32_epi32(low, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
  }
  // From the bits of float16.
  static Floats from_half(Ints x) {
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  static Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
  // From the bits of floats.
  static Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }

  // Floats of 8 bits in four vectors, by way of float16.
  template <PointType type>
  static void small_floats(const uint8_t* p, Floats* found) {
    for (int i = 0; i < 2; ++i) {
      const __m256i c = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
      __m256i half = _mm256_slli_epi16(c, 8);
      if constexpr (type == PointType::kE4M3) {
        // Exponents are 8 less than those of float16: a unit is 256. The largest code
        // is NaN: a carry out of it sets the highest bit of the exponent.
        half = _mm256_and_si256(_mm256_slli_epi16(c, 7), _mm256_set1_epi16(-0x4080));
        const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
        half =
            _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
      }
      found[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
      found[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
  }

  // Lookups, which use the low four (or five) bits of an index and ignore the others.
  struct Table16 {
    __m256 low, high;
    explicit Table16(const float* p)
        : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    Floats operator[](Ints i) const {
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i),
                              _mm256_permutevar8x32_ps(high, i),
                              _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
  };
  struct Table32 {
    Table16 low, high;
    explicit Table32(const float* p) : low(p), high(p + 16) {}
    Floats operator[](Ints i) const {
      return _mm256_blendv_ps(low[i], high[i],
                              _mm256_castsi256_ps(_mm256_slli_epi32(i, 27)));
    }
  };
  struct Table256 {
    const float* entries;
    explicit Table256(const float* p) : entries(p) {}
    Floats operator[](Ints i) const { return _mm256_i32gather_ps(entries, i, 4); }
  };

  // Digits of bytes, looked up in a table of 16 points.
  template <class F>
  static void with_digit_points(const float* points, F f) {
    if (are_halves(points)) f(BytePlanes<true>(points));
    else f(BytePlanes<false>(points));
  }

  // The scales of block `g` for `count` rows from row `i`.
  template <class Scales>
  static Floats scales(const Scales& w, int64_t g, int64_t i, int64_t count) {
    int64_t at = w.shared ? g : w.order.place(g, i);
    size_t number = w.shared ? 1 : static_cast<size_t>(count);
    __m256 found;
    if (w.scale_type == ScaleType::kFloat32) {
      found =
          load(static_cast<const float*>(w.scale) + at, static_cast<int64_t>(number));
    } else if (bytes_of(w.scale_type) == 1) {
      const auto* from = static_cast<const uint8_t*>(w.scale) + at;
      found = byte_scales<Avx2>(w, from, static_cast<int64_t>(number));
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(w.scale) + at;
      uint16_t copy[8] = {};
      if (number < 8) {
        std::memcpy(copy, from, 2 * number);
        from = copy;
      }
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      found =
          w.scale_type == ScaleType::kFloat16
              ? _mm256_cvtph_ps(half)
              : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    return w.shared ? _mm256_broadcastss_ps(_mm256_castps256_ps128(found)) : found;
  }
};

}  // namespace
}  // namespace eqquant
