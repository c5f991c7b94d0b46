// Products of AMX tiles, which are registers of 16 rows of 64 bytes.
//
// Tiles 0 to 3 hold the sums of 16 rows of inputs by the 64 rows of a panel; tile 4
// holds inputs, and tiles 5 to 7 hold codes. In a square, they hold the sums of 32 rows
// of inputs by 32 rows of a panel; tiles 4 and 5 hold inputs, and tiles 6 and 7 hold
// numbers of the panel. Each of these is then multiplied twice.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx512.h"
#include "isa/row_order.h"

namespace eqquant {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;
constexpr int64_t kTileSize = kTileRows * kTileBytes;

// The configuration of the tiles, in the layout of `ldtilecfg`.
struct TileShapes {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileShapes() {
    for (int i = 0; i < 8; ++i) {
      bytes[i] = kTileBytes;
      rows[i] = kTileRows;
    }
  }
};

// Multiplies tile 4 by the four groups of 16 rows of a panel. A macro, since the
// intrinsics take the numbers of tiles as literals.
#define EQQUANT_ADD_PANEL(multiply)                        \
  const char* const at = static_cast<const char*>(panel);  \
  written();                                               \
  _tile_loadd(4, x, kTileBytes);                           \
  _tile_loadd(5, at, kNext);                               \
  multiply(0, 4, 5);                                       \
  _tile_loadd(6, at + 64, kNext);                          \
  multiply(1, 4, 6);                                       \
  _tile_loadd(7, at + 128, kNext);                         \
  multiply(2, 4, 7);                                       \
  _tile_loadd(5, at + 192, kNext);                         \
  multiply(3, 4, 5)

// Multiplies tiles 4 and 5 by two groups of 16 rows of a panel.
#define EQQUANT_ADD_SQUARE(multiply)                       \
  const char* const at = static_cast<const char*>(panel);  \
  written();                                               \
  _tile_loadd(4, x, kTileBytes);                           \
  _tile_loadd(6, at, kNext);                               \
  multiply(0, 4, 6);                                       \
  _tile_loadd(7, at + 64, kNext);                          \
  multiply(1, 4, 7);                                       \
  _tile_loadd(5, below, kTileBytes);                       \
  multiply(2, 5, 6);                                       \
  multiply(3, 5, 7)

// Configures the tiles of the thread during its lifetime.
class Tiles {
 public:
  Tiles() {
    static constexpr TileShapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Sums of 32 bits, with a row for each row of inputs.
  static void load(const void* sums) {
    const char* const at = static_cast<const char*>(sums);
    written();
    _tile_loadd(0, at, kNext);
    _tile_loadd(1, at + 64, kNext);
    _tile_loadd(2, at + 128, kNext);
    _tile_loadd(3, at + 192, kNext);
  }
  static void store(void* sums) {
    char* const at = static_cast<char*>(sums);
    _tile_stored(0, at, kNext);
    _tile_stored(1, at + 64, kNext);
    _tile_stored(2, at + 128, kNext);
    _tile_stored(3, at + 192, kNext);
  }

  // Loads the sums of a square. The last 16 rows of inputs follow the first.
  static void load_square(const void* sums) {
    const char* const at = static_cast<const char*>(sums);
    written();
    _tile_loadd(0, at, kNext);
    _tile_loadd(1, at + 64, kNext);
    _tile_loadd(2, at + kTileRows * kNext, kNext);
    _tile_loadd(3, at + kTileRows * kNext + 64, kNext);
  }
  static void store_square(void* sums) {
    char* const at = static_cast<char*>(sums);
    _tile_stored(0, at, kNext);
    _tile_stored(1, at + 64, kNext);
    _tile_stored(2, at + kTileRows * kNext, kNext);
    _tile_stored(3, at + kTileRows * kNext + 64, kNext);
  }

  // Adds the products of a tile of `x` with the next 64 bytes of each row of a panel:
  // 8-bit integers, signed in `x` and unsigned in the panel. Loads alternate with
  // products, to overlap with them.
  static void add_integers(const void* x, const void* panel) {
    EQQUANT_ADD_PANEL(_tile_dpbsud);
  }

  // The same for pairs of bfloat16.
  static void add_bfloat16(const void* x, const void* panel) {
    EQQUANT_ADD_PANEL(_tile_dpbf16ps);
  }

  // The same for a square: the tiles of `x` and of the next 16 rows of inputs, by 32
  // rows of a panel.
  static void add_integers_square(const void* x, const void* below, const void* panel) {
    EQQUANT_ADD_SQUARE(_tile_dpbsud);
  }
  static void add_bfloat16_square(const void* x, const void* below, const void* panel) {
    EQQUANT_ADD_SQUARE(_tile_dpbf16ps);
  }

 private:
  // The stride in bytes of rows of sums, and of groups of four bytes in a panel.
  static constexpr int64_t kNext = 4 * kPanelRows;

  // A compiler barrier: GCC does not know that tile loads read memory.
  static void written() { asm volatile("" ::: "memory"); }
};

struct Amx : Avx512 {};

}  // namespace
}  // namespace eqquant
