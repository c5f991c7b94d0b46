// Products of panels with rows of digits, by tiles. They have the same bits as those in
// registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "columns.h"
#include "integers.h"
#include "kernels.h"
#include "tiles.h"

namespace eqquant {
namespace {

class IntegersInTiles {
 public:
  static constexpr int64_t kWhole = kTileBytes;
  using Scope = Tiles;

  // Few rows, or short segments, would leave most of a tile empty.
  static bool pay(const Weight& w, const Digits& x) {
    return x.number * x.rows >= kTileRows / 2 &&
           2 * codes_of(w.kind, Segment::bytes(w)) >= kTileBytes;
  }

  static int64_t scratch(const Weight& w, const Digits& x) {
    return groups(x) * Segment::number(w) * size(w) / 4;
  }

  IntegersInTiles(const Weight& w, const Digits& x, const int32_t* totals,
                  float* scratch, const Parallel& parallel)
      : w_(w), x_(x), totals_(totals), tiles_(reinterpret_cast<uint8_t*>(scratch)) {
    parallel(groups(x), [&](int64_t group, int64_t) {
      uint8_t* at = reinterpret_cast<uint8_t*>(scratch) + group * size_of_group();
      for (int64_t i = 0; i < Segment::number(w); ++i, at += size(w)) {
        const Segment s = Segment::of(w, i);
        const int64_t k = s.first * codes_per_byte(w.kind);
        to_tiles(x.digit + group * kTileRows * x.stride + k, rows_of(group), x.stride,
                 codes_of(w.kind, s.last - s.first), at);
      }
    });
  }

  template <int64_t panels>
  void add(const UnpackedSegments& segments, float* sums,
           const Soon<panels>& soon) const {
    for (int64_t group = 0; group < groups(x_); ++group) {
      const auto mine = soon.part(group, groups(x_));
      int64_t i = 0;
      for (const Unpacked& codes : segments)
        multiply(group, codes, sums + group * kTileRows * kPanelRows,
                 mine.part(i++, segments.number));
    }
  }

 private:
  static int64_t groups(const Digits& x) {
    return divided_up(x.number * x.rows, kTileRows);
  }

  // Of the tiles of a segment, in bytes.
  static int64_t size(const Weight& w) {
    return divided_up(codes_of(w.kind, Segment::bytes(w)), kTileBytes) * kTileSize;
  }
  int64_t size_of_group() const { return Segment::number(w_) * size(w_); }

  int64_t rows_of(int64_t group) const {
    return smaller(kTileRows, x_.number * x_.rows - group * kTileRows);
  }

  template <int64_t panels>
  EQQUANT_INNERMOST void multiply(int64_t group, const Unpacked& unpacked, float* sums,
                                  Soon<panels> soon) const {
    const int64_t steps = divided_up(4 * unpacked.fours, kTileBytes);
    const int64_t each = steps == 0 ? 0 : divided_up(soon.bytes, steps);
    const uint8_t* x = tiles_ + group * size_of_group() + unpacked.segment * size(w_);
    const uint8_t* codes = unpacked.codes;
    Tiles::clear();
    for (int64_t i = 0; i < steps; ++i) {
      soon.ask(each);
      Tiles::add_integers(x, codes);
      x += kTileSize;
      codes += kTileBytes * kPanelRows;
    }
    alignas(64) int32_t products[kTileRows * kPanelRows];
    Tiles::store(products);
    for (int64_t r = 0; r < rows_of(group); ++r) {
      const int64_t row = group * kTileRows + r;
      const int32_t total = totals_[row * Segment::number(w_) + unpacked.segment];
      const __m512i offset = _mm512_set1_epi32(w_.offset * total);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        const int64_t at = r * kPanelRows + 16 * v;
        const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(products + at), offset);
        add_scaled(w_, unpacked, v, sum, total, sums + at);
      }
    }
  }

  const Weight& w_;
  const Digits& x_;
  const int32_t* totals_;
  const uint8_t* tiles_;
};

}  // namespace
}  // namespace eqquant
