// Panels of codes: some bytes of 64 rows of a weight, unpacked to one code per byte, in
// groups of four codes of a row, which is what 8-bit integer products take as a lane.
//
// The lanes are not in the order of the rows, since the instructions that interleave
// bytes work within 128 bits: the lane `4 i + j` of the vector `v` is the row
// `16 i + 4 v + j`, for `i` and `j` below 4.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

struct Panel {
  // Unpacks the bytes from `first` to `last` of `count` rows (at most 64), from row
  // `n`.
  template <Codes kind>
  static void unpack(const Weight& w, int64_t n, int64_t count, int64_t first,
                     int64_t last, uint8_t* panel) {
    constexpr int64_t per = codes_per_byte(kind), step = bytes_of_fours(kind);
    const __mmask64 mask = count == 64 ? ~0ull : (1ull << count) - 1;
    for (int64_t b = first; b < last; b += step) {
      __m512i digit[step * per];
      EQQUANT_UNROLL
      for (int i = 0; i < step; ++i) {
        const uint8_t* c = w.codes + (b + i) * w.n + n;
        digits<kind>(
            b + i < last ? _mm512_maskz_loadu_epi8(mask, c) : _mm512_setzero_si512(),
            digit + i * per);
      }
      EQQUANT_UNROLL
      for (int q = 0; q < step * per / 4; ++q) {
        __m512i lanes[4];
        interleave(digit + 4 * q, lanes);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v)
          _mm512_storeu_si512(panel + 256 * q + 64 * v, lanes[v]);
      }
      panel += 64 * step * per;
    }
  }

  // Permutes numbers from the order of rows to that of lanes. It is its own inverse: a
  // transpose of 4 x 4 groups of four lanes.
  static void exchange(const __m512* from, __m512* to) {
    const __m512 a = _mm512_shuffle_f32x4(from[0], from[1], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(from[0], from[1], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
    const __m512 d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
    to[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    to[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    to[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    to[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }

  // Brings four bytes of each row together, in a lane.
  static void interleave(const __m512i* byte, __m512i* lanes) {
    const __m512i ab0 = _mm512_unpacklo_epi8(byte[0], byte[1]);
    const __m512i ab1 = _mm512_unpackhi_epi8(byte[0], byte[1]);
    const __m512i cd0 = _mm512_unpacklo_epi8(byte[2], byte[3]);
    const __m512i cd1 = _mm512_unpackhi_epi8(byte[2], byte[3]);
    lanes[0] = _mm512_unpacklo_epi16(ab0, cd0);
    lanes[1] = _mm512_unpackhi_epi16(ab0, cd0);
    lanes[2] = _mm512_unpacklo_epi16(ab1, cd1);
    lanes[3] = _mm512_unpackhi_epi16(ab1, cd1);
  }

 private:
  template <Codes kind>
  static void digits(__m512i c, __m512i* found) {
    if constexpr (kind == Codes::kInt8) {
      // Add 128: the products want unsigned codes.
      found[0] = _mm512_xor_si512(c, _mm512_set1_epi8(static_cast<char>(0x80)));
    } else if constexpr (kind == Codes::kTrits) {
      trits(c, found);
    } else {
      constexpr int per = codes_per_byte(kind), bits = 8 / per;
      const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
      EQQUANT_UNROLL
      for (int i = 0; i < per; ++i) {
        found[i] = _mm512_and_si512(_mm512_srli_epi16(c, bits * i), mask);
        // 0 and 2, so that an offset of 1 makes them -1 and 1.
        if (kind == Codes::kBits) found[i] = _mm512_add_epi8(found[i], found[i]);
      }
    }
  }

  // The five base-3 digits of each byte, by repeated division.
  static void trits(__m512i c, __m512i* found) {
    EQQUANT_UNROLL
    for (int i = 0; i < 5; ++i) {
      __m512i third = Bytes512::third(c);
      __m512i twice = _mm512_add_epi8(third, third);
      found[i] = _mm512_sub_epi8(c, _mm512_add_epi8(twice, third));
      c = third;
    }
  }
};

}  // namespace
}  // namespace eqquant
