// Products of decoded panels by rows of pairs with AMX tiles of bfloat16.
#pragma once

#include <cstdint>

#include "isa/amx.h"
#include "products/bfloat16.h"
#include "products/bfloat16_nibbles_amx.h"
#include "products/columns.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// The `Rows` of `DecodedBfloat16`. The pairs of 16 rows of inputs are the rows of a
// tile, and 16 pairs of 64 rows of a panel are four tiles, in the order of memory.
class PairsInTiles {
 public:
  // Many, since each time, the sums are loaded into tiles and stored again. The
  // operands still stay in the first cache or just beyond.
  static constexpr int64_t kCodes = 256;
  static constexpr int64_t kWhole = kTileRows;
  using Scope = Tiles;

  static int64_t whole(int64_t rows) { return groups(rows) * kTileRows; }
  static int64_t scratch(const Blocks& w, int64_t rows) {
    return groups(rows) * bfloat16_tiles(w.k) * kTileSize / 4;
  }

  PairsInTiles(const Blocks& w, const float* x, int64_t rows, float* scratch,
               const Parallel& parallel)
      : x_(reinterpret_cast<uint8_t*>(scratch)),
        size_of_group_(bfloat16_tiles(w.k) * kTileSize),
        groups_(groups(rows)) {
    round_to_tiles(x, rows, w.k, reinterpret_cast<uint8_t*>(scratch), parallel);
  }

  void add(const uint32_t* panel, int64_t first, int64_t number, float* sums) const {
    const int64_t steps = divided_up(number, kTileRows);
    const uint8_t* x = x_ + first / kTileRows * kTileSize;
    int64_t group = 0;
    for (; group + 2 <= groups_; group += 2, x += 2 * size_of_group_) {
      multiply_square(x, panel, steps, sums);
      multiply_square(x, panel + kPanelRows / 2, steps, sums + kPanelRows / 2);
      sums += 2 * kTileRows * kPanelRows;
    }
    if (group < groups_) multiply(x, panel, steps, sums);
  }

 private:
  static int64_t groups(int64_t rows) { return divided_up(rows, kTileRows); }

  // Adds the products of a group of rows with a panel to `sums`.
  EQQUANT_INNERMOST void multiply(const uint8_t* x, const uint32_t* panel,
                                  int64_t steps, float* sums) const {
    Tiles::load(sums);
    for (int64_t i = 0; i < steps; ++i) {
      Tiles::add_bfloat16(x, panel);
      x += kTileSize;
      panel += kTileRows * kPanelRows;
    }
    Tiles::store(sums);
  }

  // The same for two groups with half of a panel.
  EQQUANT_INNERMOST void multiply_square(const uint8_t* x, const uint32_t* panel,
                                         int64_t steps, float* sums) const {
    Tiles::load_square(sums);
    for (int64_t i = 0; i < steps; ++i) {
      Tiles::add_bfloat16_square(x, x + size_of_group_, panel);
      x += kTileSize;
      panel += kTileRows * kPanelRows;
    }
    Tiles::store_square(sums);
  }

  const uint8_t* x_;
  int64_t size_of_group_;
  int64_t groups_;
};

template <class V>
constexpr void add_bfloat16_amx(Kernels& found) {
  found.bfloat16_scratch = bfloat16_scratch<PairsInTiles>;
  found.bfloat16 = bfloat16<PairsInTiles>;
}

}  // namespace
}  // namespace eqquant
