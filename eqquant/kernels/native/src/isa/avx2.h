// Vectors of eight numbers (AVX2). `isa/avx512.h` has the same interface.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/basics.h"
#include "isa/byte_planes.h"
#include "isa/number_types.h"

namespace eqquant {
namespace {

// Vectors of 32 bytes.
struct Bytes256 {
  using Vector = __m256i;
  static constexpr int64_t lanes = 32;
  static constexpr int together = 1;  // the number of codes of a row in a vector
  static constexpr bool shifts_bytes = false;

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
  // Shifts pairs of bytes: bits move into the neighbouring byte.
  template <int bits>
  static Vector right(Vector x) {
    return _mm256_srli_epi16(x, bits);
  }
  template <int bits>
  static Vector left(Vector x) {
    return _mm256_slli_epi16(x, bits);
  }
  // Divides each byte by three, rounded down: `c * 171 >> 9`, which takes 16 bits, so
  // even and odd bytes are divided separately.
  static Vector third(Vector c) {
    const Vector low = _mm256_set1_epi16(0xff), factor = _mm256_set1_epi16(171);
    const Vector even =
        _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_and_si256(c, low), factor), 9);
    const Vector odd =
        _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_srli_epi16(c, 8), factor), 9);
    return either(even, _mm256_slli_epi16(odd, 8));
  }
  // Loads a table of 16 bytes.
  static Vector table(const int8_t* entries) {
    return _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
  }
  static Vector look_up(Vector table, Vector i) {
    return _mm256_shuffle_epi8(table, i);
  }
  // Converts from the order of rows to the order of lanes.
  static Vector to_lanes(Vector rows) {
    return _mm256_permutevar8x32_epi32(rows, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
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
  static Floats div(Floats x, Floats y) { return _mm256_div_ps(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
  // `z - x * y`.
  static Floats fnma(Floats x, Floats y, Floats z) { return _mm256_fnmadd_ps(x, y, z); }
  static Floats nearest(Floats x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // An approximation of `1 / x`.
  static Floats about_reciprocal(Floats x) { return _mm256_rcp_ps(x); }
  // Returns the nearest integer from 0 to `most`; NaN also becomes one of these.
  static Floats rounded(Floats x, float most) {
    return nearest(_mm256_max_ps(_mm256_min_ps(x, all(most)), zero()));
  }
  static float sum(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // The same numbers in float64. In memory, each takes the space of two floats.
  struct Wide {
    __m256d low, high;
  };
  static Wide wide(Floats x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
            _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
  }
  static Wide add(Wide x, Floats y) {
    const Wide more = wide(y);
    return {_mm256_add_pd(x.low, more.low), _mm256_add_pd(x.high, more.high)};
  }
  static Floats narrow(Wide x) {
    return _mm256_set_m128(_mm256_cvtpd_ps(x.high), _mm256_cvtpd_ps(x.low));
  }
  static Wide load_wide(const float* p) {
    return {_mm256_castps_pd(load(p)), _mm256_castps_pd(load(p + width))};
  }
  static void store_wide(float* p, Wide x) {
    store(p, _mm256_castpd_ps(x.low));
    store(p + width, _mm256_castpd_ps(x.high));
  }

  // A mask of the first `count` lanes. Masked loads give zeros in the other lanes.
  struct Mask {
    __m256i of;
  };
  static Mask first(int64_t count) {
    return {_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                               _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
  }
  static Mask at_least(Ints x, Ints y) {
    return {_mm256_or_si256(_mm256_cmpgt_epi32(x, y), _mm256_cmpeq_epi32(x, y))};
  }
  static Mask without(Mask x, Mask y) { return {_mm256_andnot_si256(y.of, x.of)}; }
  static uint32_t bits(Mask x) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(x.of)));
  }
  static Floats load(const float* p, int64_t count) {
    return _mm256_maskload_ps(p, first(count).of);
  }
  static void store(float* p, Floats x, int64_t count) {
    _mm256_maskstore_ps(p, first(count).of, x);
  }

  static Floats only(Floats x, Mask mask) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(mask.of));
  }
  static Floats only(Floats x, int64_t count) { return only(x, first(count)); }
  static Ints only(Ints x, Mask mask) { return _mm256_and_si256(x, mask.of); }
  // Returns a bit for each lane that is NaN.
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
  // The low 32 bits of products.
  static Ints product(Ints x, Ints y) { return _mm256_mullo_epi32(x, y); }
  static Ints minus(Ints x, Ints y) { return _mm256_sub_epi32(x, y); }
  template <int bits>
  static Ints left(Ints x) {
    return _mm256_slli_epi32(x, bits);
  }
  static Ints add(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
  static Ints max(Ints x, Ints y) { return _mm256_max_epi32(x, y); }
  static int32_t sum(Ints x) {
    return over_lanes(x, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
  }
  static int32_t largest(Ints x) {
    return over_lanes(x, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
  }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static Ints load(const int32_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(int32_t* p, Ints x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), x);
  }
  static Ints either(Ints x, Ints y) { return _mm256_or_si256(x, y); }
  static Ints both(Ints x, int32_t y) { return _mm256_and_si256(x, ints(y)); }
  // Returns the bits of `mask` from bit `at` on, of pairs of words.
  template <int at>
  static Ints bits_from(Ints low, Ints high, Ints mask) {
    return _mm256_and_si256(either(right<at>(low), left<32 - at>(high)), mask);
  }
  template <int at>
  static Ints bits_from(Ints low, Ints mask) {
    return _mm256_and_si256(right<at>(low), mask);
  }
  // Adds the products of four 8-bit integers in each lane. `x` is unsigned, and at most
  // `most`; `y` is signed. It is fastest up to `small`: for larger integers, the sums
  // of two products do not fit in 16 bits.
  static constexpr bool signs = false;  // of `x`
  static constexpr int small = 127;
  template <int most = 255>
  static Ints dot8(Ints sum, Ints x, Ints y) {
    if constexpr (most <= small) {
      return dot16(sum, _mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1));
    } else {
      Ints mine[2], others[2];
      to_words<false>(x, mine);
      to_words<true>(y, others);
      return dot16(dot16(sum, mine[0], others[0]), mine[1], others[1]);
    }
  }
  template <int most = 255>
  static void add_dot8(Ints& sum, Ints x, Ints y) {
    sum = dot8<most>(sum, x, y);
  }
  // Adds the four bytes of each lane, without signs.
  static Ints add_bytes(Ints sum, Ints x) {
    return dot16(sum, _mm256_maddubs_epi16(x, _mm256_set1_epi8(1)),
                 _mm256_set1_epi16(1));
  }
  // Adds the products of two integers of 16 bits in each lane.
  static Ints dot16(Ints sum, Ints x, Ints y) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
  }
  static void add_dot16(Ints& sum, Ints x, Ints y) { sum = dot16(sum, x, y); }

  // Brings four bytes of each row together in a lane: see `weight/panel.h`.
  static void interleave(const __m256i* byte, Ints* lanes) {
    const __m256i ab0 = _mm256_unpacklo_epi8(byte[0], byte[1]);
    const __m256i ab1 = _mm256_unpackhi_epi8(byte[0], byte[1]);
    const __m256i cd0 = _mm256_unpacklo_epi8(byte[2], byte[3]);
    const __m256i cd1 = _mm256_unpackhi_epi8(byte[2], byte[3]);
    lanes[0] = _mm256_unpacklo_epi16(ab0, cd0);
    lanes[1] = _mm256_unpackhi_epi16(ab0, cd0);
    lanes[2] = _mm256_unpacklo_epi16(ab1, cd1);
    lanes[3] = _mm256_unpackhi_epi16(ab1, cd1);
  }
  // Converts four vectors of numbers from the order of rows to the order of these
  // lanes, and back.
  static void to_lanes(const Floats* from, Floats* to) {
    for (int v = 0; v < 2; ++v) {
      to[2 * v] = _mm256_permute2f128_ps(from[v], from[v + 2], 0x20);
      to[2 * v + 1] = _mm256_permute2f128_ps(from[v], from[v + 2], 0x31);
    }
  }
  static void to_rows(const Floats* from, Floats* to) {
    for (int v = 0; v < 2; ++v) {
      to[v] = _mm256_permute2f128_ps(from[2 * v], from[2 * v + 1], 0x20);
      to[v + 2] = _mm256_permute2f128_ps(from[2 * v], from[2 * v + 1], 0x31);
    }
  }

  // Returns two 16-bit integers in each lane.
  static Ints side_by_side(Ints first, Ints second) {
    return _mm256_blend_epi16(first, left<16>(second), 0xaa);
  }
  // Widens four bytes: the first and the third, and the others.
  template <bool sign>
  static void to_words(Ints bytes, Ints* two) {
    if constexpr (sign) {
      two[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      two[1] = _mm256_srai_epi16(bytes, 8);
    } else {
      two[0] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
      two[1] = _mm256_srli_epi16(bytes, 8);
    }
  }
  static Ints words(int16_t x) { return _mm256_set1_epi16(x); }
  static Ints minus_words(Ints x, Ints y) { return _mm256_sub_epi16(x, y); }
  // A table of 16 such integers.
  struct WordTable {
    __m256i low, high;
    explicit WordTable(const float* p) {
      int8_t first[16], second[16];
      for (int i = 0; i < 16; ++i) {
        const int point = static_cast<int>(p[i]);
        first[i] = static_cast<int8_t>(point);
        second[i] = static_cast<int8_t>(point >> 8);
      }
      low = Bytes::table(first);
      high = Bytes::table(second);
    }
    Ints operator[](Ints i) const {
      // (The upper bytes of indices are zeros.)
      const __m256i above = _mm256_slli_epi16(_mm256_shuffle_epi8(high, i), 8);
      return _mm256_or_si256(above, _mm256_and_si256(_mm256_shuffle_epi8(low, i),
                                                     _mm256_set1_epi16(0xff)));
    }
  };

  static Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
  // Stores integers of 8 and of 16 bits, saturated.
  static void store_bytes(int8_t* p, Ints x, int64_t count) {
    const __m128i words = narrow(x);
    int8_t bytes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm_packs_epi16(words, words));
    std::memcpy(p, bytes, static_cast<size_t>(count));
  }
  static void store_words(int16_t* p, Ints x, int64_t count) {
    int16_t words[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words), narrow(x));
    std::memcpy(p, words, 2 * static_cast<size_t>(count));
  }
  static __m128i narrow(Ints x) {
    return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  // Stores the lowest byte of each number.
  static void store_bytes(uint8_t* p, Floats x) {
    const __m256i low = _mm256_shuffle_epi8(_mm256_cvtps_epi32(x),
                                            _mm256_set1_epi32(0x0c080400));
    const __m256i both =
        _mm256_permutevar8x32_epi32(low, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
  }
  // Converts from the bits of float16.
  static Floats from_half(Ints x) {
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  // Converts from the lower and the upper bytes of float16.
  static void from_halves(__m256i low, __m256i high, Floats* found) {
    const auto two = [](__m128i l, __m128i h, Floats* to) {
      to[0] = _mm256_cvtph_ps(_mm_unpacklo_epi8(l, h));
      to[1] = _mm256_cvtph_ps(_mm_unpackhi_epi8(l, h));
    };
    two(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high), found);
    two(_mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1), found + 2);
  }
  // Loads 16-bit numbers of the rows of a panel, in the order of lanes. Four numbers of
  // adjacent rows are next to each other in lanes, too.
  static void halves_in_lanes(const uint16_t* p, ScaleType type, Floats* lanes) {
    const auto four = [](const uint16_t* at) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    };
    for (int v = 0; v < 4; ++v)
      lanes[v] = from_16_bits(
          _mm_unpacklo_epi64(four(p + 4 * v), four(p + 16 + 4 * v)), type);
  }
  static Floats from_16_bits(__m128i x, ScaleType type) {
    return type == ScaleType::kFloat16
               ? _mm256_cvtph_ps(x)
               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
  // Reinterprets bits as floats.
  static Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
  // Returns the bits of absolute values, which are ordered like the values.
  static Ints absolute(Floats x) {
    return both(_mm256_castps_si256(x), 0x7fffffff);
  }

  // Converts 8-bit floats in four vectors, by way of float16.
  template <PointType type>
  static void small_floats(const uint8_t* p, Floats* found) {
    for (int i = 0; i < 2; ++i) {
      const __m256i c = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
      __m256i half = _mm256_slli_epi16(c, 8);
      if constexpr (type == PointType::kE4M3) {
        // Exponents are 8 less than in float16: a unit is 256. The largest code is NaN:
        // a carry out of it sets the highest bit of the exponent.
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
  template <bool halves>
  using Planes = BytePlanes<halves>;
  template <class F>
  static void with_digit_points(const float* points, F f) {
    if (are_halves(points)) f(BytePlanes<true>(points));
    else f(BytePlanes<false>(points));
  }

  // Returns the scales of block `g` for `count` rows from row `i`.
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
      found = from_16_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)),
                           w.scale_type);
    }
    return w.shared ? _mm256_broadcastss_ps(_mm256_castps256_ps128(found)) : found;
  }

 private:
  template <class F>
  static int32_t over_lanes(Ints x, F f) {
    __m128i half = f(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = f(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(f(half, _mm_shuffle_epi32(half, 1)));
  }
};

}  // namespace
}  // namespace eqquant
