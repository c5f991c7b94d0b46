// Panels of codes: some bytes of as many rows of a weight as a vector has bytes,
// unpacked to one code per byte, in groups of four codes of a row, which are a lane of
// 8-bit integer products.
//
// The lanes are not in the order of the rows, since the instructions that interleave
// bytes work within 128 bits: the lane `4 i + j` of the vector `v` is the row
// `16 i + 4 v + j`, for `v` and `j` below 4.
#pragma once

#include <cstdint>

#include "weight/packing.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

template <class V>
struct Panel {
  using B = typename V::Bytes;
  using Vector = typename B::Vector;
  static constexpr int64_t kRows = B::lanes;

  // Returns the number to subtract from unpacked codes, if there are no zero-points.
  static int32_t offset(const Blocks& w) {
    if (w.packing == Packing::kBits8) return V::signs ? 0 : 128;
    return -static_cast<int32_t>(w.points[0]);
  }

  // Unpacks the bytes from `first` to `last` of `count` rows (at most `kRows`), from row
  // `n`.
  template <Packing packing>
  static void unpack(const Blocks& w, int64_t n, int64_t count, int64_t first,
                     int64_t last, uint8_t* panel) {
    constexpr int64_t per = codes_per_byte(packing), step = bytes_of_fours(packing);
    for (int64_t b = first; b < last; b += step) {
      Vector digit[step * per];
      EQQUANT_UNROLL
      for (int i = 0; i < step; ++i) {
        const uint8_t* c = w.bytes + (b + i) * w.n + n;
        Vector some = B::all(0);
        if (b + i < last) some = count == kRows ? B::load(c) : B::load(c, count);
        digits<packing>(some, digit + i * per);
      }
      EQQUANT_UNROLL
      for (int q = 0; q < step * per / 4; ++q) {
        typename V::Ints lanes[4];
        V::interleave(digit + 4 * q, lanes);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) B::store(panel + (4 * q + v) * kRows, lanes[v]);
      }
      panel += kRows * step * per;
    }
  }

 private:
  template <Packing packing>
  static void digits(Vector c, Vector* found) {
    if constexpr (packing == Packing::kBits8) {
      // Adds 128, if the products need unsigned codes.
      found[0] = V::signs ? c : B::differing(c, B::all(static_cast<char>(0x80)));
    } else if constexpr (packing == Packing::kTrits) {
      trits(c, found);
    } else {
      constexpr int per = codes_per_byte(packing), bits = 8 / per;
      unrolled<per>([&](auto i) {
        found[i] = B::both(B::template right<bits * i>(c), (1 << bits) - 1);
        // 0 and 2, so that an offset of 1 makes them -1 and 1.
        if (packing == Packing::kBits1) found[i] = B::template left<1>(found[i]);
      });
    }
  }

  // Extracts the five base-3 digits of each byte, by repeated division.
  static void trits(Vector c, Vector* found) {
    EQQUANT_UNROLL
    for (int i = 0; i < 5; ++i) {
      const Vector third = B::third(c);
      found[i] = B::minus(B::minus(B::minus(c, third), third), third);
      c = third;
    }
  }
};

}  // namespace
}  // namespace eqquant
