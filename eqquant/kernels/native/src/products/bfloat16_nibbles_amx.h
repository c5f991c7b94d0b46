// Products along the blocks of a weight of nibbles, with AMX tiles of bfloat16. The
// decoded numbers are scaled before they are rounded, so the sums, which stay in tiles,
// need no scaling.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/amx.h"
#include "isa/avx512.h"
#include "products/bfloat16_nibbles.h"
#include "products/columns.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// The number of bytes of each row of a panel that are decoded at a time.
constexpr int64_t kBfloat16TilesBytes = 64;

// The largest number of adjacent panels of a task.
constexpr int kBfloat16TilesPanels = 16;

// The number of tiles for a row of `k` inputs. A row of a tile has 16 pairs of inputs.
inline int64_t bfloat16_tiles(int64_t k) { return divided_up(k, 32); }

// Rounds rows of `k` inputs to tiles of pairs: the tiles of the first 16 rows, then of
// the next 16. The last rows and the last pairs are padded with zeros.
inline void round_to_tiles(const float* x, int64_t rows, int64_t k, uint8_t* tiles,
                           const Parallel& parallel) {
  parallel(divided_up(rows, kTileRows), [&](int64_t group, int64_t) {
    uint8_t* to = tiles + group * bfloat16_tiles(k) * kTileSize;
    for (int64_t i = 0; i < k; i += 32)
      for (int64_t r = group * kTileRows; r < (group + 1) * kTileRows; ++r) {
        const int64_t here = r < rows ? smaller(32, k - i) : 0;
        const float* const from = x + r * k + i;
        const __m512 low = Avx512::load(from, smaller(16, here));
        const __m512 high = Avx512::load(from + 16, larger(0, here - 16));
        const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
        __builtin_memcpy(to, &pairs, kTileBytes);
        to += kTileBytes;
      }
  });
}

// Products with up to `kTogether` adjacent panels.
template <int64_t kTogether>
class Bfloat16Tiles {
 public:
  Bfloat16Tiles(const Blocks& w, const uint8_t* x, float* y, int64_t rows)
      : w_(w), x_(x), y_(y), rows_(rows), points_(w.points) {
    uint16_t at[32];
    for (uint16_t i = 0; i < 32; ++i) at[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    in_pairs_ = _mm512_loadu_si512(at);
  }

  // Computes the products with the `count` rows of `W` from row `n`, which are the
  // panels.
  void columns(int64_t n, int64_t count, float* sums) const {
    const Tiles tiles;
    const int64_t panels = divided_up(count, kPanelRows);
    const int64_t each = groups() * kTileRows * kPanelRows;
    LongSums<Avx512> all(sums, panels * each, 2 * w_.in_bytes.row, kBfloat16Summed);
    for (int64_t first = 0; first < w_.in_bytes.row; first += kBfloat16TilesBytes) {
      const int64_t last = smaller(first + kBfloat16TilesBytes, w_.in_bytes.row);
      const int64_t next = smaller(kBfloat16TilesBytes, w_.in_bytes.row - last);
      const Soon<kTogether> soon = {w_.bytes + last * w_.n + n, w_.n, next};
      for (int64_t p = 0; p < panels; ++p)
        some(n + p * kPanelRows, smaller(kPanelRows, count - p * kPanelRows), first,
             last, sums + p * each, soon.part(p, panels));
      all.reach(2 * last);
    }
    all.finish();
    store_columns<Avx512>(w_, sums, each, rows_, n, count, y_);
  }

 private:
  int64_t groups() const { return divided_up(rows_, kTileRows); }

  // Decodes and multiplies the bytes from `first` to `last` of a panel.
  void some(int64_t n, int64_t count, int64_t first, int64_t last, float* sums,
            const Soon<kTogether>& soon) const {
    alignas(64) uint32_t panel[kBfloat16TilesBytes * kPanelRows];
    decode(n, count, first, last, panel);
    for (int64_t group = 0; group < groups(); ++group)
      multiply(group, panel, first, last, sums + group * kTileRows * kPanelRows,
               soon.part(group, groups()));
  }

  void decode(int64_t n, int64_t count, int64_t first, int64_t last,
              uint32_t* panel) const {
    __m512 scale[4];
    int64_t block_end = first;
    for (int64_t b = first; b < last; ++b) {
      if (b == block_end) {
        const int64_t block = b / w_.in_bytes.block;
        block_end = (block + 1) * w_.in_bytes.block;
        scales_of_panel<Avx512>(w_, block, n, count, scale);
      }
      const uint8_t* const c = w_.bytes + b * w_.n + n;
      for (int64_t v = 0; v < 4; ++v, panel += 16) {
        const int64_t here = larger(0, smaller(16, count - 16 * v));
        const __m512i codes = Avx512::bytes<false>(c + 16 * v, here);
        const __m512 low = _mm512_mul_ps(points_[codes], scale[v]);
        const __m512 high = _mm512_mul_ps(points_[Avx512::right<4>(codes)], scale[v]);
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        __m512i bits;
        __builtin_memcpy(&bits, &both, 64);
        _mm512_store_si512(panel, _mm512_permutexvar_epi16(in_pairs_, bits));
      }
    }
    for (int64_t b = last; (b - first) % kTileRows != 0; ++b)
      for (int64_t v = 0; v < 4; ++v, panel += 16)
        _mm512_store_si512(panel, _mm512_setzero_si512());
  }

  EQQUANT_INNERMOST void multiply(int64_t group, const uint32_t* panel, int64_t first,
                                  int64_t last, float* sums,
                                  Soon<kTogether> soon) const {
    const int64_t steps = divided_up(last - first, kTileRows);
    const int64_t each = divided_up(soon.bytes, steps);
    // A byte is a pair of numbers.
    const uint8_t* x =
        x_ +
        (group * bfloat16_tiles(2 * w_.in_bytes.row) + first / kTileRows) * kTileSize;
    Tiles::load(sums);
    for (int64_t i = 0; i < steps; ++i) {
      soon.ask(each);
      Tiles::add_bfloat16(x, panel);
      x += kTileSize;
      panel += kTileRows * kPanelRows;
    }
    Tiles::store(sums);
  }

  const Blocks& w_;
  const uint8_t* x_;
  float* y_;
  int64_t rows_;
  Avx512::Table16 points_;
  __m512i in_pairs_;
};

inline int64_t bfloat16_tiles_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  const int64_t whole = divided_up(rows, kTileRows) * kTileRows;
  return whole / kTileRows * bfloat16_tiles(2 * w.in_bytes.row) * kTileSize / 4 +
         sums_of_columns<Avx512, kBfloat16TilesPanels>(w, whole, workers);
}

inline void bfloat16_by_tiles(const Blocks& w, const float* x, float* y, int64_t rows,
                              float* scratch, const Parallel& parallel) {
  const int64_t whole = divided_up(rows, kTileRows) * kTileRows;
  float* const sums = scratch;
  uint8_t* const tiles = reinterpret_cast<uint8_t*>(
      sums + sums_of_columns<Avx512, kBfloat16TilesPanels>(w, whole, parallel.workers));
  round_to_tiles(x, rows, 2 * w.in_bytes.row, tiles, parallel);
  over_columns<Avx512, kBfloat16TilesPanels>(
      w, whole, sums, parallel,
      [&](auto panels, int64_t n, int64_t count, float* mine) {
        const Bfloat16Tiles<decltype(panels)::value> product(w, tiles, y, rows);
        product.columns(n, count, mine);
      });
}

template <class V>
constexpr void add_bfloat16_nibbles_amx(Kernels& found) {
  found.bfloat16_nibbles_scratch = bfloat16_tiles_scratch;
  found.bfloat16_nibbles = bfloat16_by_tiles;
}

}  // namespace
}  // namespace eqquant
