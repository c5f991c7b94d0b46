// Vectors of sixteen numbers (AVX512). `isa/avx2.h` has the same interface.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/basics.h"
#include "isa/number_types.h"

namespace eqquant {
namespace {

// Vectors of 64 bytes.
struct Bytes512 {
  using Vector = __m512i;
  static constexpr int64_t lanes = 64;
  static constexpr int together = 1;  // the number of codes of a row in a vector
  static constexpr bool shifts_bytes = false;

  static Vector load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Vector load(const uint8_t* p, int64_t count) {
    return _mm512_maskz_loadu_epi8((1ull << count) - 1, p);
  }
  static void store(uint8_t* p, Vector x) { _mm512_store_si512(p, x); }
  static Vector all(char x) { return _mm512_set1_epi8(x); }
  static Vector both(Vector x, char y) {
    return _mm512_and_si512(x, all(y));
  }
  static Vector either(Vector x, Vector y) { return _mm512_or_si512(x, y); }
  static Vector differing(Vector x, Vector y) { return _mm512_xor_si512(x, y); }
  static Vector minus(Vector x, Vector y) { return _mm512_sub_epi8(x, y); }
  // Shifts pairs of bytes: bits move into the neighbouring byte.
  template <int bits>
  static Vector right(Vector x) {
    return _mm512_srli_epi16(x, bits);
  }
  template <int bits>
  static Vector left(Vector x) {
    return _mm512_slli_epi16(x, bits);
  }
  // Divides each byte by three, rounded down: `c * 171 >> 9`, which takes 16 bits, so
  // even and odd bytes are divided separately.
  static Vector third(Vector c) {
    const Vector low = _mm512_set1_epi16(0xff), factor = _mm512_set1_epi16(171);
    const Vector even =
        _mm512_srli_epi16(_mm512_mullo_epi16(_mm512_and_si512(c, low), factor), 9);
    const Vector odd =
        _mm512_srli_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(c, 8), factor), 9);
    return either(even, _mm512_slli_epi16(odd, 8));
  }
  // Loads a table of 16 bytes.
  static Vector table(const int8_t* entries) {
    return _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
  }
  static Vector look_up(Vector table, Vector i) {
    return _mm512_shuffle_epi8(table, i);
  }
  // Converts from the order of rows to the order of lanes.
  static Vector to_lanes(Vector rows) {
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), rows);
  }
};

struct Avx512 {
  using Bytes = Bytes512;
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
  static Floats div(Floats x, Floats y) { return _mm512_div_ps(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
  // `z - x * y`.
  static Floats fnma(Floats x, Floats y, Floats z) { return _mm512_fnmadd_ps(x, y, z); }
  static Floats nearest(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // An approximation of `1 / x`.
  static Floats about_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }
  // Returns the nearest integer from 0 to `most`; NaN also becomes one of these.
  static Floats rounded(Floats x, float most) {
    return nearest(_mm512_max_ps(_mm512_min_ps(x, all(most)), zero()));
  }
  static float sum(Floats x) { return _mm512_reduce_add_ps(x); }

  // The same numbers in float64. In memory, each takes the space of two floats.
  struct Wide {
    __m512d low, high;
  };
  static Wide wide(Floats x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
            _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
  }
  static Wide add(Wide x, Floats y) {
    const Wide more = wide(y);
    return {_mm512_add_pd(x.low, more.low), _mm512_add_pd(x.high, more.high)};
  }
  static Floats narrow(Wide x) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.low)),
                              _mm512_cvtpd_ps(x.high), 1);
  }
  static Wide load_wide(const float* p) {
    return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + width)};
  }
  static void store_wide(float* p, Wide x) {
    _mm512_storeu_pd(p, x.low);
    _mm512_storeu_pd(p + width, x.high);
  }

  // A mask of the first `count` lanes. Masked loads give zeros in the other lanes.
  using Mask = __mmask16;
  static Mask first(int64_t count) { return static_cast<Mask>((1u << count) - 1); }
  static Mask at_least(Ints x, Ints y) { return _mm512_cmpge_epi32_mask(x, y); }
  static Mask without(Mask x, Mask y) { return static_cast<Mask>(x & ~y); }
  static uint32_t bits(Mask x) { return x; }
  static Floats load(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps(first(count), p);
  }
  static void store(float* p, Floats x, int64_t count) {
    _mm512_mask_storeu_ps(p, first(count), x);
  }

  static Floats only(Floats x, Mask mask) { return _mm512_maskz_mov_ps(mask, x); }
  static Floats only(Floats x, int64_t count) { return only(x, first(count)); }
  static Ints only(Ints x, Mask mask) { return _mm512_maskz_mov_epi32(mask, x); }
  // Returns a bit for each lane that is NaN.
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
  // The low 32 bits of products.
  static Ints product(Ints x, Ints y) { return _mm512_mullo_epi32(x, y); }
  static Ints minus(Ints x, Ints y) { return _mm512_sub_epi32(x, y); }
  template <int bits>
  static Ints left(Ints x) {
    return _mm512_slli_epi32(x, bits);
  }
  static Ints add(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
  static Ints max(Ints x, Ints y) { return _mm512_max_epi32(x, y); }
  static int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x); }
  static int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static Ints load(const int32_t* p) { return _mm512_load_si512(p); }
  static void store(int32_t* p, Ints x) { _mm512_store_si512(p, x); }
  static Ints either(Ints x, Ints y) { return _mm512_or_si512(x, y); }
  static Ints both(Ints x, int32_t y) { return _mm512_and_si512(x, ints(y)); }
  // Returns the bits of `mask` from bit `at` on, of pairs of words.
  template <int at>
  static Ints bits_from(Ints low, Ints high, Ints mask) {
    // (low | high) & mask
    return _mm512_ternarylogic_epi32(right<at>(low), left<32 - at>(high), mask, 0xa8);
  }
  template <int at>
  static Ints bits_from(Ints low, Ints mask) {
    return _mm512_and_si512(right<at>(low), mask);
  }
  // Converts 8-bit floats in four vectors, by way of float16.
  template <PointType type>
  static void small_floats(const uint8_t* p, Floats* found) {
    EQQUANT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m512i c = _mm512_cvtepi8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i)));
      __m512i half;
      if constexpr (type == PointType::kE5M2) {
        half = _mm512_slli_epi16(c, 8);
      } else {
        // Exponents are 8 less than in float16: a unit is 256. The largest code is NaN:
        // a carry out of it sets the highest bit of the exponent.
        half = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16(-0x4080));
        const __m512i carry = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
        half =
            _mm512_or_si512(half, _mm512_and_si512(carry, _mm512_set1_epi16(0x4000)));
      }
      found[2 * i] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      found[2 * i + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
  }

  // Adds the products of four 8-bit integers in each lane. `x` is unsigned, and at most
  // `most`; `y` is signed. It is fastest up to `small`.
  static constexpr bool signs = false;  // of `x`
  static constexpr int small = 255;
  template <int most = 255>
  static Ints dot8(Ints sum, Ints x, Ints y) {
    return _mm512_dpbusd_epi32(sum, x, y);
  }
  // The same in place. (With several sums, the compiler would copy the results of the
  // function above between registers, and some to memory.)
  template <int most = 255>
  static void add_dot8(Ints& sum, Ints x, Ints y) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  }
  // Adds the four bytes of each lane, without signs.
  static Ints add_bytes(Ints sum, Ints x) {
    return _mm512_dpbusd_epi32(sum, x, _mm512_set1_epi8(1));
  }
  // Adds the products of two integers of 16 bits in each lane.
  static Ints dot16(Ints sum, Ints x, Ints y) { return _mm512_dpwssd_epi32(sum, x, y); }
  static void add_dot16(Ints& sum, Ints x, Ints y) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  }

  // Brings four bytes of each row together in a lane: see `weight/panel.h`.
  static void interleave(const __m512i* byte, Ints* lanes) {
    const __m512i ab0 = _mm512_unpacklo_epi8(byte[0], byte[1]);
    const __m512i ab1 = _mm512_unpackhi_epi8(byte[0], byte[1]);
    const __m512i cd0 = _mm512_unpacklo_epi8(byte[2], byte[3]);
    const __m512i cd1 = _mm512_unpackhi_epi8(byte[2], byte[3]);
    lanes[0] = _mm512_unpacklo_epi16(ab0, cd0);
    lanes[1] = _mm512_unpackhi_epi16(ab0, cd0);
    lanes[2] = _mm512_unpacklo_epi16(ab1, cd1);
    lanes[3] = _mm512_unpackhi_epi16(ab1, cd1);
  }
  // Converts four vectors of numbers from the order of rows to the order of these
  // lanes, and back: a transpose of 4 x 4 groups of four lanes.
  static void to_lanes(const Floats* from, Floats* to) {
    const __m512 a = _mm512_shuffle_f32x4(from[0], from[1], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(from[0], from[1], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
    const __m512 d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
    to[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    to[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    to[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    to[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  static void to_rows(const Floats* from, Floats* to) { to_lanes(from, to); }

  // Returns two 16-bit integers in each lane.
  static Ints side_by_side(Ints first, Ints second) {
    // first & 0xffff | second << 16
    return _mm512_ternarylogic_epi32(first, ints(0xffff), left<16>(second), 0xea);
  }
  // Widens four bytes: the first and the third, and the others.
  template <bool sign>
  static void to_words(Ints bytes, Ints* two) {
    if constexpr (sign) {
      two[0] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
      two[1] = _mm512_srai_epi16(bytes, 8);
    } else {
      two[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff));
      two[1] = _mm512_srli_epi16(bytes, 8);
    }
  }
  static Ints words(int16_t x) { return _mm512_set1_epi16(x); }
  static Ints minus_words(Ints x, Ints y) { return _mm512_sub_epi16(x, y); }
  // A table of 16 such integers.
  struct WordTable {
    __m512i entries;
    explicit WordTable(const float* p)
        : entries(_mm512_zextsi256_si512(
              _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_loadu_ps(p))))) {}
    Ints operator[](Ints i) const { return _mm512_permutexvar_epi16(i, entries); }
  };

  static Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
  // Stores integers of 8 and of 16 bits, saturated.
  static void store_bytes(int8_t* p, Ints x, int64_t count) {
    _mm512_mask_cvtsepi32_storeu_epi8(p, first(count), x);
  }
  static void store_words(int16_t* p, Ints x, int64_t count) {
    _mm512_mask_cvtsepi32_storeu_epi16(p, first(count), x);
  }
  // Stores the lowest byte of each number.
  static void store_bytes(uint8_t* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
  }
  // Converts from the bits of float16.
  static Floats from_half(Ints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  // Converts from the lower and the upper bytes of float16.
  static void from_halves(__m512i low, __m512i high, Floats* found) {
    const auto in_two = [](__m256i l, __m256i h, Floats* to) {
      const __m512i half = _mm512_or_si512(
          _mm512_cvtepu8_epi16(l), _mm512_slli_epi16(_mm512_cvtepu8_epi16(h), 8));
      to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    };
    in_two(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high), found);
    in_two(_mm512_extracti64x4_epi64(low, 1), _mm512_extracti64x4_epi64(high, 1),
           found + 2);
  }
  // Loads 16-bit numbers of the rows of a panel, in the order of lanes. Four numbers of
  // adjacent rows are next to each other in lanes, too.
  static void halves_in_lanes(const uint16_t* p, ScaleType type, Floats* lanes) {
    const __m512i first = _mm512_loadu_si512(p), last = _mm512_loadu_si512(p + 32);
    const auto two = [&](__m512i fours, Floats* to) {
      const __m512i found = _mm512_permutex2var_epi64(first, fours, last);
      to[0] = from_16_bits(_mm512_castsi512_si256(found), type);
      to[1] = from_16_bits(_mm512_extracti64x4_epi64(found, 1), type);
    };
    two(_mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), lanes);
    two(_mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15), lanes + 2);
  }
  static Floats from_16_bits(__m256i x, ScaleType type) {
    return type == ScaleType::kFloat16
               ? _mm512_cvtph_ps(x)
               : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  // Reinterprets bits as floats.
  static Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
  // Returns the bits of absolute values, which are ordered like the values.
  static Ints absolute(Floats x) {
    return both(_mm512_castps_si512(x), 0x7fffffff);
  }

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
  // Lookups in 256 entries: the low five bits of an index choose in each of eight
  // tables, and the others choose the table.
  struct Table256 {
    __m512 entries[16];
    explicit Table256(const float* p) {
      for (int i = 0; i < 16; ++i) entries[i] = _mm512_loadu_ps(p + 16 * i);
    }
    Floats operator[](Ints i) const {
      const auto in = [&](int j) {
        return _mm512_permutex2var_ps(entries[2 * j], i, entries[2 * j + 1]);
      };
      const auto choose = [&](int bit, Floats x, Floats y) {
        return _mm512_mask_mov_ps(x, _mm512_test_epi32_mask(i, ints(bit)), y);
      };
      const auto low = choose(64, choose(32, in(0), in(1)), choose(32, in(2), in(3)));
      const auto high = choose(64, choose(32, in(4), in(5)), choose(32, in(6), in(7)));
      return choose(128, low, high);
    }
  };

  // Digits of bytes, looked up in a table of 16 points: a vector has 64 bytes, four in
  // each lane. A lane is shifted right by a multiple of 8 bits and by the bits of the
  // digits before; a digit is then the index of a lookup, which ignores higher bits.
  struct DigitPoints {
    Table16 points;
    template <int shift, int bits>
    void look_up(Ints codes, Floats* found) const {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v)
        found[v] = points[_mm512_srli_epi32(codes, 8 * v + shift)];
    }

    // Deals 64 numbers in the same way: number `4 i + v` to lane `i` of vector `v`.
    static void deal(const float* from, __m512* to) {
      const __m512i first =
          _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
      const __m512i last = _mm512_add_epi32(first, ints(2));
      const auto two = [&](const float* p, __m512i which) {
        return _mm512_permutex2var_ps(load(p), which, load(p + 16));
      };
      const __m512 a = two(from, first), b = two(from + 32, first);
      const __m512 c = two(from, last), d = two(from + 32, last);
      to[0] = _mm512_shuffle_f32x4(a, b, 0x44);
      to[1] = _mm512_shuffle_f32x4(a, b, 0xee);
      to[2] = _mm512_shuffle_f32x4(c, d, 0x44);
      to[3] = _mm512_shuffle_f32x4(c, d, 0xee);
    }
    static void collect(const Floats* from, float* to) {
      alignas(64) float dealt[64];
      for (int v = 0; v < 4; ++v) _mm512_store_ps(dealt + 16 * v, from[v]);
      for (int i = 0; i < 64; ++i) to[i] = dealt[i % 4 * 16 + i / 4];
    }
  };
  template <class F>
  static void with_digit_points(const float* points, F f) {
    f(DigitPoints{Table16(points)});
  }

  // Returns the scales of block `g` for `count` rows from row `i`.
  template <class Scales>
  static Floats scales(const Scales& w, int64_t g, int64_t i, int64_t count) {
    const __mmask16 mask = w.shared ? 1 : first(count);
    const int64_t at = w.shared ? g : w.order.place(g, i);
    __m512 found;
    if (w.scale_type == ScaleType::kFloat32) {
      found = _mm512_maskz_loadu_ps(mask, static_cast<const float*>(w.scale) + at);
    } else if (bytes_of(w.scale_type) == 1) {
      const auto* from = static_cast<const uint8_t*>(w.scale) + at;
      found = byte_scales<Avx512>(w, from, w.shared ? 1 : count);
    } else {
      found = from_16_bits(
          _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(w.scale) + at),
          w.scale_type);
    }
    return w.shared ? _mm512_broadcastss_ps(_mm512_castps512_ps128(found)) : found;
  }
};

}  // namespace
}  // namespace eqquant
