// Rows of inputs as two digits of 8 bits each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

inline void row_to_digits(const float* x, int64_t k, int8_t* first, int8_t* second,
                          float* unit) {
  using V = Avx512;
  __m512 largest = _mm512_setzero_ps();
  __mmask16 strange = 0;
  for (int64_t i = 0; i < k; i += 16) {
    __m512 a = _mm512_abs_ps(V::load(x + i, smaller(16, k - i)));
    largest = _mm512_max_ps(largest, a);
    strange |= _mm512_fpclass_ps_mask(a, 0x99);  // NaNs and infinities
  }
  float most = _mm512_reduce_max_ps(largest);
  float size = most == 0                      ? 1
               : most / 127 < 1.17549435e-38f ? 1.17549435e-38f
                                              : most / 127;
  const __m512 s = V::all(size);
  for (int64_t i = 0; i < k; i += 16) {
    __mmask16 mask = V::first(smaller(16, k - i));
    __m512 v = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, x + i), s);
    __m512 r = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_mul_ps(_mm512_sub_ps(v, r), V::all(254));
    _mm512_mask_cvtsepi32_storeu_epi8(first + i, mask, _mm512_cvtps_epi32(r));
    _mm512_mask_cvtsepi32_storeu_epi8(second + i, mask, _mm512_cvtps_epi32(rest));
  }
  *unit = strange ? __builtin_nanf("") : size;
}

inline void to_digits(const float* x, int64_t rows, int64_t k, const Digits& digits,
                      int8_t* digit, float* unit, const Parallel& parallel) {
  const int64_t stride = digits.stride;
  parallel(rows, [&](int64_t m, int64_t) {
    int8_t* first = digit + m * stride;
    int8_t* second = first + rows * stride;
    for (int64_t i = k; i < stride; ++i) first[i] = second[i] = 0;
    row_to_digits(x + m * k, k, first, second, unit + m);
  });
}

}  // namespace
}  // namespace eqquant
