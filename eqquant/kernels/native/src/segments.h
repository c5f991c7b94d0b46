// Segments of a weight: parts of its blocks, which are unpacked at a time, and sums of
// inputs over them.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "panel.h"

namespace eqquant {
namespace {

// The largest number of codes of a segment: few enough that no sum overflows 32 bits,
// nor (less the offset) the 24 bits of a float32.
constexpr int64_t kIntegersCodes = 256;

// A part of a block: some bytes of each row that share a scale and fit in a panel.
struct Segment {
  int64_t block, first, last;

  static int64_t bytes(const Weight& w) {
    const int64_t step = bytes_of_fours(w.kind);
    return smaller(w.block, kIntegersCodes / (step * codes_per_byte(w.kind)) * step);
  }
  static int64_t of_block(const Weight& w) { return divided_up(w.block, bytes(w)); }
  static int64_t number(const Weight& w) { return w.blocks * of_block(w); }

  // (Those at the end of the last block may be empty.)
  static Segment of(const Weight& w, int64_t i) {
    const int64_t block = i / of_block(w), size = bytes(w);
    const int64_t first = block * w.block + i % of_block(w) * size;
    const int64_t end = smaller((block + 1) * w.block, w.bytes);
    return {block, smaller(first, end), smaller(first + size, end)};
  }
};

inline int32_t total(const int8_t* x, int64_t fours) {
  __m512i sum = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t q = 0; q < fours; q += 16) {
    const __mmask16 mask = Avx512::first(smaller(16, fours - q));
    sum = _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi32(mask, x + 4 * q));
  }
  return _mm512_reduce_add_epi32(sum);
}

// The sum of a row of digits over each segment, by which offsets are subtracted.
inline void sum_up(const Weight& w, const Digits& x, int64_t row, int32_t* totals) {
  for (int64_t i = 0; i < Segment::number(w); ++i) {
    const Segment s = Segment::of(w, i);
    totals[i] = total(x.digit + row * x.stride + s.first * codes_per_byte(w.kind),
                      codes_of(w.kind, s.last - s.first) / 4);
  }
}

// A segment of a panel: its codes, the number of fours of them, the position `k` of the
// first in `x`, and the scales and zero-points in the order of lanes.
struct Unpacked {
  const uint8_t* codes;
  int64_t segment, fours, k;
  __m512 scale[4], zero[4];
};

// The largest number of segments that are unpacked together.
constexpr int64_t kSegments = 16;

struct UnpackedSegments {
  int64_t number;
  Unpacked of[kSegments];

  const Unpacked* begin() const { return of; }
  const Unpacked* end() const { return of + number; }
};

}  // namespace
}  // namespace eqquant
