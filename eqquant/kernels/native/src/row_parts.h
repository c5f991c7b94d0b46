// Splits rows of inputs into parts of three 8-bit digits, which are nearly as exact as
// float32.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "digits.h"
#include "fours.h"
#include "kernels.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

// What inputs of a row are in a part of it: those whose absolute value has bits from
// `from` to below `end`, of which the largest is `largest`.
struct PartOfRow {
  int64_t row;
  int32_t from, end, largest;
};

// The parts of row `m`: its inputs, and if there are some that are too large for the
// digits of the others, those. Returns how many, or 0 if two do not suffice.
inline int64_t parts_of(const float* x, int64_t k, int64_t m, float least,
                        PartOfRow* parts) {
  constexpr int64_t orders = int64_t{6} << 23;
  Range all = Range::of(x, k), ordinary = all;
  const bool two = all.largest >= all.limit;
  if (two) count_outliers(x, k, ordinary);
  // Too small: the unit would be subnormal, which some threads flush to zero.
  const float unit = as_float(ordinary.largest) / 127;
  const bool tiny =
      ordinary.largest >= kSmallest && unit * least < as_float(kSmallest);
  if (tiny || (two && all.largest >= smaller(all.limit + orders, kInfinity))) return 0;
  parts[0] = {m, 0, two ? all.limit : kInfinity, ordinary.largest};
  if (!two) return 1;
  parts[1] = {m, all.limit, kInfinity, all.largest};
  return 2;
}

// Writes the three digits of the inputs of a part, and zeros for the others.
inline void write_digits(const float* x, int64_t k, const PartOfRow& part, float unit,
                         int64_t stride, int8_t* digit) {
  const __m512 s = _mm512_set1_ps(unit);
  const __m512i from = _mm512_set1_epi32(part.from), end = _mm512_set1_epi32(part.end);
  for (int64_t i = 0; i < k; i += 16) {
    const int64_t here = smaller(16, k - i);
    const __mmask16 mask = Avx512::first(here);
    const __m512i a = absolute(x + i, here);
    const __mmask16 mine = static_cast<__mmask16>(
        mask & _mm512_cmpge_epi32_mask(a, from) & _mm512_cmplt_epi32_mask(a, end));
    __m512 v = _mm512_maskz_div_ps(mine, _mm512_maskz_loadu_ps(mine, x + i), s);
    EQQUANT_UNROLL
    for (int d = 0; d < 3; ++d) {
      const __m512 r =
          _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm512_mask_cvtsepi32_storeu_epi8(digit + d * stride + i, mask,
                                        _mm512_cvtps_epi32(r));
      v = _mm512_mul_ps(_mm512_sub_ps(v, r), _mm512_set1_ps(254));
    }
  }
  for (int d = 0; d < 3; ++d)
    for (int64_t i = k; i < stride; ++i) digit[d * stride + i] = 0;
}

// Brings the digits of codes that share a lane together.
template <int apart>
void order_as_fours(int8_t* digit, int64_t stride) {
  for (int64_t k = 0; k < stride; k += 4 * apart, digit += 4 * apart) {
    int8_t some[4 * apart];
    for (int i = 0; i < 4 * apart; ++i) some[i] = digit[i / 4 + i % 4 * apart];
    __builtin_memcpy(digit, some, sizeof some);
  }
}

inline void order_as_fours(int64_t apart, int8_t* digit, int64_t stride) {
  switch (apart) {
    case 2: return order_as_fours<2>(digit, stride);
    case 4: return order_as_fours<4>(digit, stride);
    case 8: return order_as_fours<8>(digit, stride);
  }
}

inline int64_t to_parts(const Blocks& w, const float* x, int64_t rows, float least,
                        int64_t stride, int8_t* digit, float* unit, int32_t* before,
                        int64_t* row, int32_t* none, const Parallel& parallel) {
  PartOfRow parts[2 * kFewPartRows];
  int64_t number = 0;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t found = parts_of(x + m * w.k, w.k, m, least, parts + number);
    none[m] = found == 0 ? kNoDigits : 0;
    number += found;
  }
  const int64_t groups = stride / kRun + 1;
  parallel(number, [&](int64_t i, int64_t) {
    const PartOfRow& part = parts[i];
    int8_t* const mine = digit + 3 * i * stride;
    row[i] = part.row;
    unit[i] = part.largest < kSmallest ? 1 : as_float(part.largest) / 127;
    write_digits(x + part.row * w.k, w.k, part, unit[i], stride, mine);
    order_as_fours(apart_in_fours(w.packing), mine, 3 * stride);
    for (int d = 0; d < 3; ++d) {
      int32_t* const sum = before + (3 * i + d) * groups;
      sum[0] = 0;
      for (int64_t g = 0; g + 1 < groups; ++g) {
        const __m128i some = _mm_loadu_si128(
            reinterpret_cast<const __m128i*>(mine + d * stride + g * kRun));
        sum[g + 1] = sum[g] + _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(some));
      }
    }
  });
  return number;
}

}  // namespace
}  // namespace eqquant
