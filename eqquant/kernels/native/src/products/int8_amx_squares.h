// Products of panels by many rows of digits with AMX tiles, for weights with one scale
// for each row. The sums, of 32 rows of digits by 32 rows of a panel, stay in 32 bits
// to the end, so each loaded tile is multiplied twice.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/amx.h"
#include "products/columns.h"
#include "products/int8.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// Rows of digits are numbered in the order of memory: the first digits of all rows of
// `x`, then their second digits, if there are any.
class IntegersInSquares {
 public:
  // More than in registers, since each time, the sums are loaded into tiles and stored
  // again. The codes still stay in the first cache.
  static constexpr int64_t kCodes = 512;
  static constexpr int64_t kWhole = kTileBytes;
  static constexpr bool kOnce = true;
  using Scope = Tiles;

  // Whether squares are worth it, and no sum overflows 32 bits.
  static bool pay(const Blocks& w, const Digits& x) {
    return w.in_bytes.blocks == 1 && codes_of(w.packing, w.in_bytes.row) <= 1 << 16 &&
           x.number * x.rows >= 4 * kTileRows;
  }

  static int64_t scratch(const Blocks& w, const Digits& x) {
    return squares(x) * 2 * size_of_row(w) / 4 + x.number * x.rows;
  }

  // The sums of a panel are followed by its products.
  static int64_t rows_of_sums(const Digits& x) {
    return x.rows + squares(x) * 2 * kTileRows;
  }

  IntegersInSquares(const Blocks& w, const Digits& x, const int32_t* totals,
                    float* scratch, const Parallel& parallel)
      : w_(w), x_(x), tiles_(reinterpret_cast<uint8_t*>(scratch)) {
    uint8_t* const tiles = reinterpret_cast<uint8_t*>(scratch);
    parallel(squares(x) * 2, [&](int64_t t, int64_t) {
      uint8_t* at = tiles + t * size_of_row(w);
      for (int64_t i = 0; i < Segment::number(w); ++i, at += size(w)) {
        const Segment s = Segment::of(w, i);
        fill(t, s.first * codes_per_byte(w.packing),
             codes_of(w.packing, s.last - s.first), at);
      }
    });
    int32_t* const sums =
        reinterpret_cast<int32_t*>(tiles + squares(x) * 2 * size_of_row(w));
    for (int64_t row = 0; row < x.number * x.rows; ++row) {
      sums[row] = 0;
      for (int64_t i = 0; i < Segment::number(w); ++i)
        sums[row] += totals[row * Segment::number(w) + i];
    }
    totals_ = sums;
  }

  template <int64_t panels>
  void add(const UnpackedSegments<Avx512>& segments, float* sums,
           const Soon<panels>& soon) const {
    const Unpacked<Avx512>&first = segments.of[0], &last = segments.of[segments.number - 1];
    const int64_t steps = (last.codes - first.codes) / kStep +
                          divided_up(4 * last.fours, kTileBytes);
    int32_t* const products = reinterpret_cast<int32_t*>(sums + x_.rows * kPanelRows);
    const uint8_t* const x = tiles_ + first.segment * size(w_);
    for (int64_t i = 0; i < squares(x_); ++i)
      multiply(x + i * 2 * size_of_row(w_), first, steps,
               products + i * 2 * kTileRows * kPanelRows, soon.part(i, squares(x_)));
    if (last.segment + 1 < Segment::number(w_)) return;
    x_.number == 2 ? scale<2>(last, products, sums) : scale<1>(last, products, sums);
  }

 private:
  // The bytes of a panel that are multiplied at a time.
  static constexpr int64_t kStep = kTileBytes * kPanelRows;

  static int64_t squares(const Digits& x) {
    return divided_up(x.number * x.rows, 2 * kTileRows);
  }

  // The size of the tiles of 16 rows of digits, in bytes: of a segment, and of all.
  static int64_t size(const Blocks& w) {
    return divided_up(codes_of(w.packing, Segment::bytes(w)), kTileBytes) * kTileSize;
  }
  static int64_t size_of_row(const Blocks& w) { return Segment::number(w) * size(w); }

  // Copies `codes` digits of 16 rows, from position `k`, to tiles.
  void fill(int64_t t, int64_t k, int64_t codes, uint8_t* tiles) const {
    for (int64_t i = 0; i < codes; i += kTileBytes)
      for (int64_t r = 0; r < kTileRows; ++r, tiles += kTileBytes) {
        const int64_t row = t * kTileRows + r;
        const bool exists = row < x_.number * x_.rows;
        const int64_t here = exists ? smaller(kTileBytes, codes - i) : 0;
        const __mmask64 mask = here == 64 ? ~0ull : (1ull << here) - 1;
        _mm512_storeu_si512(
            tiles, _mm512_maskz_loadu_epi8(mask, x_.digit + row * x_.stride + k + i));
      }
  }

  // Adds the products of 32 rows of digits with some segments to `products`.
  template <int64_t panels>
  EQQUANT_INNERMOST void multiply(const uint8_t* x, const Unpacked<Avx512>& first,
                                  int64_t steps, int32_t* products,
                                  Soon<panels> soon) const {
    const int64_t each = steps == 0 ? 0 : divided_up(soon.bytes, 2 * steps);
    const uint8_t* const below = x + size_of_row(w_);
    for (int64_t half = 0; half < 2; ++half) {
      int32_t* const mine = products + half * kPanelRows / 2;
      const uint8_t* const codes = first.codes + half * 2 * kPanelRows;
      if (first.segment == 0)
        Tiles::clear();
      else
        Tiles::load_square(mine);
      for (int64_t i = 0; i < steps; ++i) {
        soon.template ask<2>(each);
        Tiles::add_integers_square(x + i * kTileSize, below + i * kTileSize,
                                   codes + i * kStep);
      }
      Tiles::store_square(mine);
    }
  }

  // Adds the scaled products to `sums`.
  template <int digits>
  EQQUANT_INNERMOST void scale(const Unpacked<Avx512>& codes, const int32_t* products,
                               float* sums) const {
    for (int64_t m = 0; m < x_.rows; ++m) {
      int32_t total[digits];
      for (int d = 0; d < digits; ++d) total[d] = totals_[d * x_.rows + m];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        __m512i product[digits];
        EQQUANT_UNROLL
        for (int d = 0; d < digits; ++d)
          product[d] = _mm512_sub_epi32(
              _mm512_loadu_si512(products + (d * x_.rows + m) * kPanelRows + 16 * v),
              _mm512_set1_epi32(Panel<Avx512>::offset(w_) * total[d]));
        add_scaled<Avx512, digits>(w_, codes, v, product, total, sums + m * kPanelRows + 16 * v);
      }
    }
  }

  const Blocks& w_;
  const Digits& x_;
  const uint8_t* tiles_;
  const int32_t* totals_;
};

}  // namespace
}  // namespace eqquant
