// Products of tiles: registers of 16 rows of 64 bytes (AMX).
//
// Four of them hold sums: of 16 rows of inputs, with the 64 rows of a panel.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "columns.h"
#include "kernels.h"

namespace eqquant {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;
constexpr int64_t kTileSize = kTileRows * kTileBytes;

// What tiles there are, as an instruction reads it.
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

// While one of these lives, the thread has tiles.
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

  // Sums of 32 bits: a row for each of the inputs.
  static void load(const void* sums) {
    const char* const at = static_cast<const char*>(sums);
    written();
    _tile_loadd(0, at, kSums);
    _tile_loadd(1, at + 64, kSums);
    _tile_loadd(2, at + 128, kSums);
    _tile_loadd(3, at + 192, kSums);
  }
  static void store(void* sums) {
    char* const at = static_cast<char*>(sums);
    _tile_stored(0, at, kSums);
    _tile_stored(1, at + 64, kSums);
    _tile_stored(2, at + 128, kSums);
    _tile_stored(3, at + 192, kSums);
    written();
  }

  // Adds the products of a tile of `x` with the next 64 bytes of each row of a panel:
  // integers of 8 bits, which have no sign in the panel.
  static void add_integers(const void* x, const void* panel) {
    const char* const at = static_cast<const char*>(panel);
    written();
    _tile_loadd(4, x, kTileBytes);
    _tile_loadd(5, at, kPanel);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, at + 64, kPanel);
    _tile_dpbsud(1, 4, 6);
    _tile_loadd(7, at + 128, kPanel);
    _tile_dpbsud(2, 4, 7);
    _tile_loadd(5, at + 192, kPanel);
    _tile_dpbsud(3, 4, 5);
  }

  // The same with pairs of bfloat16.
  static void add_bfloat16(const void* x, const void* panel) {
    const char* const at = static_cast<const char*>(panel);
    written();
    _tile_loadd(4, x, kTileBytes);
    _tile_loadd(5, at, kPanel);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, at + 64, kPanel);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, at + 128, kPanel);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, at + 192, kPanel);
    _tile_dpbf16ps(3, 4, 5);
  }

 private:
  // From a row of sums, or from four bytes of each row of a panel, to the next.
  static constexpr int64_t kSums = 4 * kPanelRows, kPanel = 4 * kPanelRows;

  // GCC does not know that to load a tile is to read memory.
  static void written() { asm volatile("" ::: "memory"); }
};

// Bytes of up to 16 rows as tiles, one after another, filled up with zeros.
inline void to_tiles(const void* x, int64_t rows, int64_t stride, int64_t bytes,
                     uint8_t* tiles) {
  for (int64_t i = 0; i < bytes; i += kTileBytes)
    for (int64_t r = 0; r < kTileRows; ++r, tiles += kTileBytes) {
      const int64_t here = r < rows ? smaller(kTileBytes, bytes - i) : 0;
      const __mmask64 mask = here == 64 ? ~0ull : (1ull << here) - 1;
      const char* const from = static_cast<const char*>(x) + r * stride + i;
      _mm512_storeu_si512(tiles, _mm512_maskz_loadu_epi8(mask, from));
    }
}

}  // namespace
}  // namespace eqquant
