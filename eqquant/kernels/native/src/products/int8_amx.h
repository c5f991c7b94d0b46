// Products of panels by rows of digits with AMX tiles. Results are bit-identical to
// `IntegersInRegisters`, except in rows with outliers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/amx.h"
#include "products/columns.h"
#include "products/int8.h"
#include "products/int8_amx_squares.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// For few rows of `x`, and weights of several blocks: a tile has the first digits of
// some rows, then their second digits, if there are any.
class IntegersInTiles {
 public:
  static constexpr int64_t kCodes = kIntegersCodes;
  static constexpr int64_t kWhole = kTileBytes;
  static constexpr bool kOnce = false;
  using Scope = Tiles;

  // Whether tiles are worth it: few rows or short segments leave most of a tile empty.
  static bool pay(const Blocks& w, const Digits& x) {
    return x.number * x.rows >= kTileRows / 2 &&
           2 * codes_of(w.packing, Segment::bytes(w)) >= kTileBytes;
  }

  static int64_t scratch(const Blocks& w, const Digits& x) {
    return groups(x) * Segment::number(w) * size(w) / 4;
  }

  static int64_t rows_of_sums(const Digits& x) { return x.rows; }

  IntegersInTiles(const Blocks& w, const Digits& x, const int32_t* totals,
                  float* scratch, const Parallel& parallel)
      : w_(w), x_(x), totals_(totals), tiles_(reinterpret_cast<uint8_t*>(scratch)) {
    parallel(groups(x), [&](int64_t group, int64_t) {
      uint8_t* at = reinterpret_cast<uint8_t*>(scratch) + group * size_of_group();
      for (int64_t i = 0; i < Segment::number(w); ++i, at += size(w)) {
        const Segment s = Segment::of(w, i);
        fill(group, s.first * codes_per_byte(w.packing),
             codes_of(w.packing, s.last - s.first), at);
      }
    });
  }

  template <int64_t panels>
  void add(const UnpackedSegments<Avx512>& segments, float* sums,
           const Soon<panels>& soon) const {
    for (int64_t group = 0; group < groups(x_); ++group) {
      const auto mine = soon.part(group, groups(x_));
      float* const to = sums + group * each(x_) * kPanelRows;
      int64_t i = 0;
      for (const Unpacked<Avx512>& codes : segments) {
        const auto some = mine.part(i++, segments.number);
        if (x_.number == 2)
          multiply<2>(group, codes, to, some);
        else
          multiply<1>(group, codes, to, some);
      }
    }
  }

 private:
  // The number of rows of `x` in a tile.
  static int64_t each(const Digits& x) { return kTileRows / x.number; }
  static int64_t groups(const Digits& x) { return divided_up(x.rows, each(x)); }

  // The size of the tiles of a segment, in bytes.
  static int64_t size(const Blocks& w) {
    return divided_up(codes_of(w.packing, Segment::bytes(w)), kTileBytes) * kTileSize;
  }
  int64_t size_of_group() const { return Segment::number(w_) * size(w_); }

  // Copies `codes` digits of a group of rows, from position `k`, to tiles.
  void fill(int64_t group, int64_t k, int64_t codes, uint8_t* tiles) const {
    for (int64_t i = 0; i < codes; i += kTileBytes)
      for (int64_t r = 0; r < kTileRows; ++r, tiles += kTileBytes) {
        const int64_t m = group * each(x_) + r % each(x_);
        const int64_t here = m < x_.rows ? smaller(kTileBytes, codes - i) : 0;
        const __mmask64 mask = here == 64 ? ~0ull : (1ull << here) - 1;
        const int64_t row = r / each(x_) * x_.rows + m;
        _mm512_storeu_si512(
            tiles, _mm512_maskz_loadu_epi8(mask, x_.digit + row * x_.stride + k + i));
      }
  }

  template <int digits, int64_t panels>
  EQQUANT_INNERMOST void multiply(int64_t group, const Unpacked<Avx512>& unpacked, float* sums,
                                  Soon<panels> soon) const {
    const int64_t steps = divided_up(4 * unpacked.fours, kTileBytes);
    const int64_t some = steps == 0 ? 0 : divided_up(soon.bytes, steps);
    const uint8_t* x = tiles_ + group * size_of_group() + unpacked.segment * size(w_);
    const uint8_t* codes = unpacked.codes;
    Tiles::clear();
    for (int64_t i = 0; i < steps; ++i) {
      soon.ask(some);
      Tiles::add_integers(x, codes);
      x += kTileSize;
      codes += kTileBytes * kPanelRows;
    }
    alignas(64) int32_t found[kTileRows * kPanelRows];
    Tiles::store(found);
    constexpr int64_t rows = kTileRows / digits;
    const int64_t first = group * rows;
    for (int64_t r = 0; r < smaller(rows, x_.rows - first); ++r) {
      int32_t total[digits];
      for (int d = 0; d < digits; ++d)
        total[d] =
            totals_[(d * x_.rows + first + r) * Segment::number(w_) + unpacked.segment];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        __m512i products[digits];
        EQQUANT_UNROLL
        for (int d = 0; d < digits; ++d)
          products[d] = _mm512_sub_epi32(
              _mm512_load_si512(found + (d * rows + r) * kPanelRows + 16 * v),
              _mm512_set1_epi32(Panel<Avx512>::offset(w_) * total[d]));
        add_scaled<Avx512, digits>(w_, unpacked, v, products, total,
                           sums + r * kPanelRows + 16 * v);
      }
    }
  }

  const Blocks& w_;
  const Digits& x_;
  const int32_t* totals_;
  const uint8_t* tiles_;
};

// (Uses registers if tiles do not pay.)
inline int64_t int8_scratch_of_tiles(const Blocks& w, const Digits& x,
                                     int64_t workers) {
  if (IntegersInSquares::pay(w, x))
    return int8_scratch<Avx512, IntegersInSquares>(w, x, workers);
  return IntegersInTiles::pay(w, x)
             ? int8_scratch<Avx512, IntegersInTiles>(w, x, workers)
             : table_of(kAvx512).int8_scratch(w, x, workers);
}

inline void int8_by_tiles(const Blocks& w, const Digits& x, float* y, float* scratch,
                          const Parallel& parallel) {
  if (IntegersInSquares::pay(w, x))
    int8<Avx512, IntegersInSquares>(w, x, y, scratch, parallel);
  else if (IntegersInTiles::pay(w, x))
    int8<Avx512, IntegersInTiles>(w, x, y, scratch, parallel);
  else
    table_of(kAvx512).int8(w, x, y, scratch, parallel);
}

template <class V>
constexpr void add_int8_amx(Kernels& found) {
  found.int8_scratch = int8_scratch_of_tiles;
  found.int8 = int8_by_tiles;
}

}  // namespace
}  // namespace eqquant
