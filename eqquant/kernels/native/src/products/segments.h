// Segments of a weight: parts of its blocks that are unpacked at a time, and sums of
// inputs over them.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// The largest number of codes of a segment: few enough that no sum overflows 32 bits,
// or (less the offset) the 24 bits of a float32.
constexpr int64_t kIntegersCodes = 256;

// A part of a block: some bytes of each row that share a scale and fit in a panel.
struct Segment {
  int64_t block, first, last;

  static int64_t bytes(const Blocks& w) {
    const int64_t step = bytes_of_fours(w.packing);
    return smaller(w.in_bytes.block,
                   kIntegersCodes / (step * codes_per_byte(w.packing)) * step);
  }
  static int64_t of_block(const Blocks& w) {
    return divided_up(w.in_bytes.block, bytes(w));
  }
  static int64_t number(const Blocks& w) { return w.in_bytes.blocks * of_block(w); }

  // (Segments at the end of the last block may be empty.)
  static Segment of(const Blocks& w, int64_t i) {
    const int64_t block = i / of_block(w), size = bytes(w);
    const int64_t first = block * w.in_bytes.block + i % of_block(w) * size;
    const int64_t end = smaller((block + 1) * w.in_bytes.block, w.in_bytes.row);
    return {block, smaller(first, end), smaller(first + size, end)};
  }
};

template <class V>
int32_t total(const int8_t* x, int64_t number) {
  using B = typename V::Bytes;
  auto sum = V::ints(0);
  for (int64_t i = 0; i < number; i += B::lanes) {
    const auto* const at = reinterpret_cast<const uint8_t*>(x + i);
    const int64_t left = number - i;
    const auto some = left < B::lanes ? B::load(at, left) : B::load(at);
    sum = V::dot8(sum, B::all(1), some);
  }
  return V::sum(sum);
}

// The sum of a row of digits over each segment, by which offsets are subtracted.
template <class V>
void sum_up(const Blocks& w, const Digits& x, int64_t row, int32_t* totals) {
  for (int64_t i = 0; i < Segment::number(w); ++i) {
    const Segment s = Segment::of(w, i);
    totals[i] = total<V>(x.digit + row * x.stride + s.first * codes_per_byte(w.packing),
                         codes_of(w.packing, s.last - s.first));
  }
}

// A segment of a panel: its codes, the number of fours of them, the position `k` of the
// first in `x`, and the scales and zero-points in the order of lanes.
template <class V>
struct Unpacked {
  const uint8_t* codes;
  int64_t segment, fours, k;
  typename V::Floats scale[4], zero[4];
};

// The largest number of segments that are unpacked together.
constexpr int64_t kSegments = 16;

template <class V>
struct UnpackedSegments {
  int64_t number;
  Unpacked<V> of[kSegments];

  const Unpacked<V>* begin() const { return of; }
  const Unpacked<V>* end() const { return of + number; }
};

}  // namespace
}  // namespace eqquant
