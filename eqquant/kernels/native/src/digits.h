// Rounds rows of inputs to two 8-bit digits, or to 16-bit integers (words), with
// outliers apart.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "simd_avx512.h"
#include "words_of_fours.h"

namespace eqquant {
namespace {

// Every input of at least 64 times the geometric mean of the nonzero inputs of its row
// is an outlier. The range is in 128ths of an octave. Logarithms are read off the bits
// of floats, which makes them up to 11 of these too low: hence the 12.
constexpr int64_t kOutlierRange = 6 * 128 - 12;

constexpr int32_t kInfinity = 0x7f800000, kSmallest = 0x00800000;

// The bits of absolute values, which are ordered as the values are.
inline __m512i absolute(const float* x, int64_t count) {
  return _mm512_and_si512(_mm512_castps_si512(Avx512::load(x, count)),
                          _mm512_set1_epi32(0x7fffffff));
}

inline float as_float(int32_t bits) {
  float found;
  __builtin_memcpy(&found, &bits, 4);
  return found;
}

// The largest absolute value of a row, and the least one that is an outlier, as bits.
struct Range {
  int32_t largest, limit;

  static Range of(const float* x, int64_t k) {
    __m512i largest = _mm512_setzero_si512();
    const __m512i smallest = _mm512_set1_epi32(kSmallest);
    const __m512i some = _mm512_set1_epi32(kInfinity - kSmallest);
    int64_t total = 0, number = 0;
    for (int64_t i = 0; i < k;) {
      // So many terms do not overflow 32 bits.
      __m512i sum = _mm512_setzero_si512();
      for (const int64_t end = smaller(i + (1 << 15), k); i < end; i += 16) {
        const __m512i a = absolute(x + i, smaller(16, k - i));
        largest = _mm512_max_epi32(largest, a);
        const __mmask16 mask =
            _mm512_cmplt_epu32_mask(_mm512_sub_epi32(a, smallest), some);
        sum = _mm512_mask_add_epi32(sum, mask, sum, _mm512_srli_epi32(a, 16));
        number += __builtin_popcount(mask);
      }
      total += _mm512_reduce_add_epi32(sum);
    }
    int64_t limit = kInfinity;
    if (number != 0) limit = smaller(limit, (total / number + kOutlierRange) << 16);
    return {_mm512_reduce_max_epi32(largest), static_cast<int32_t>(limit)};
  }
};

// Counts the outliers of a row, and reduces `range.largest` to the others.
inline int64_t count_outliers(const float* x, int64_t k, Range& range) {
  __m512i largest = _mm512_setzero_si512();
  const __m512i limit = _mm512_set1_epi32(range.limit);
  int64_t number = 0;
  for (int64_t i = 0; i < k; i += 16) {
    const __m512i a = absolute(x + i, smaller(16, k - i));
    const __mmask16 mask = _mm512_cmpge_epi32_mask(a, limit);
    largest = _mm512_mask_max_epi32(largest, static_cast<__mmask16>(~mask), largest, a);
    number += __builtin_popcount(mask);
  }
  range.largest = _mm512_reduce_max_epi32(largest);
  return number;
}

// How a row is rounded: to integers up to `most`, in a unit of its own.
struct Rounding {
  int32_t limit;
  float unit;
  int64_t outliers;  // how many, or `kNoDigits`

  // `least`: by what the unit is multiplied, at least. `many`: how many outliers a row
  // may have.
  static Rounding of(const float* x, int64_t k, float most, float least, int64_t many) {
    Range range = Range::of(x, k);
    const bool any = range.largest >= range.limit;
    const int64_t number = any ? count_outliers(x, k, range) : 0;
    const float unit = as_float(range.largest) / most;
    // Too small: the unit would be subnormal, which some threads flush to zero.
    const bool tiny = range.largest >= kSmallest && unit * least < as_float(kSmallest);
    const bool none = number > many || tiny;
    return {range.limit, none || range.largest < kSmallest ? 1 : unit,
            none ? kNoDigits : number};
  }

  // Calls `put(i, mask, v)` for the inputs from position `i` on of those that have
  // digits, 16 at a time: `v` is in units, and zero for outliers, which are written
  // apart.
  template <class Put>
  void over(const float* x, int64_t k, Outlier* outlier, Put put) const {
    const __m512 s = _mm512_set1_ps(unit);
    for (int64_t i = 0; i < k; i += 16) {
      const __mmask16 mask = Avx512::first(smaller(16, k - i));
      const __mmask16 large = _mm512_cmpge_epi32_mask(
          absolute(x + i, smaller(16, k - i)), _mm512_set1_epi32(limit));
      const __mmask16 inside = static_cast<__mmask16>(mask & ~large);
      put(i, mask,
          _mm512_maskz_div_ps(inside, _mm512_maskz_loadu_ps(inside, x + i), s));
      for (uint32_t left = large; left != 0; left &= left - 1) {
        const int64_t at = i + __builtin_ctz(left);
        *outlier++ = {static_cast<int32_t>(at), x[at] / unit};
      }
    }
  }
};

inline void to_digits(const float* x, int64_t k, const Digits& digits, int8_t* digit,
                      float* unit, int32_t* outliers, Outlier* outlier,
                      const Parallel& parallel) {
  const int64_t rows = digits.rows, stride = digits.stride;
  parallel(rows, [&](int64_t m, int64_t) {
    int8_t* const first = digit + m * stride;
    int8_t* const second = first + rows * stride;
    const Rounding row = Rounding::of(x + m * k, k, 127, 1, digits.most);
    outliers[m] = static_cast<int32_t>(row.outliers);
    unit[m] = row.unit;
    const int64_t written = row.outliers == kNoDigits ? 0 : k;
    row.over(x + m * k, written, outlier + m * digits.most,
             [&](int64_t i, __mmask16 mask, __m512 v) {
               const __m512 r = _mm512_roundscale_ps(
                   v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
               const __m512 rest =
                   _mm512_mul_ps(_mm512_sub_ps(v, r), _mm512_set1_ps(254));
               _mm512_mask_cvtsepi32_storeu_epi8(first + i, mask,
                                                 _mm512_cvtps_epi32(r));
               _mm512_mask_cvtsepi32_storeu_epi8(second + i, mask,
                                                 _mm512_cvtps_epi32(rest));
             });
    for (int64_t i = written; i < stride; ++i) first[i] = second[i] = 0;
  });
}

// `least`: by what units are multiplied, at least.
inline void to_words(const Blocks& w, const float* x, float least, const Words& words,
                     int16_t* word, float* sums, float* unit, int32_t* outliers,
                     Outlier* outlier, const Parallel& parallel) {
  const int64_t k = w.k, apart = apart_in_words(w);
  parallel(words.rows, [&](int64_t m, int64_t) {
    int16_t* const mine = word + m * words.stride;
    const int64_t groups = divided_up(words.stride, 16);
    float* const sum = sums == nullptr ? nullptr : sums + m * groups;
    const Rounding row = Rounding::of(x + m * k, k, kMostWord, least, words.most);
    outliers[m] = static_cast<int32_t>(row.outliers);
    unit[m] = row.unit;
    const int64_t written = row.outliers == kNoDigits ? 0 : k;
    row.over(x + m * k, written, outlier + m * words.most,
             [&](int64_t i, __mmask16 mask, __m512 v) {
               const __m512i r = _mm512_cvtps_epi32(v);
               _mm512_mask_cvtsepi32_storeu_epi16(mine + i, mask, r);
               if (sum != nullptr)
                 sum[i / 16] = static_cast<float>(_mm512_reduce_add_epi32(r));
             });
    for (int64_t i = written; i < words.stride; ++i) mine[i] = 0;
    if (sum != nullptr)
      for (int64_t i = divided_up(written, 16); i < groups; ++i) sum[i] = 0;
    if (apart != 0) order_as_words(apart, mine, words.stride);
  });
}

}  // namespace
}  // namespace eqquant
