// Kernels for AVX512 with tile products (AMX).
#include "bfloat16_tiles.h"
#include "decoded_bfloat16.h"
#include "decoded_bfloat16_tiles.h"
#include "integer_squares.h"
#include "integer_tiles.h"
#include "integers.h"
#include "kernels.h"

namespace eqquant {
namespace amx {

int64_t integers_scratch(const Weight& w, const Digits& x, int64_t workers) {
  if (IntegersInSquares::pay(w, x))
    return eqquant::integers_scratch<IntegersInSquares>(w, x, workers);
  return IntegersInTiles::pay(w, x)
             ? eqquant::integers_scratch<IntegersInTiles>(w, x, workers)
             : avx512_kernels.integers_scratch(w, x, workers);
}

void integers(const Weight& w, const Digits& x, float* y, float* scratch,
              const Parallel& parallel) {
  if (IntegersInSquares::pay(w, x))
    eqquant::integers<IntegersInSquares>(w, x, y, scratch, parallel);
  else if (IntegersInTiles::pay(w, x))
    eqquant::integers<IntegersInTiles>(w, x, y, scratch, parallel);
  else
    avx512_kernels.integers(w, x, y, scratch, parallel);
}

int64_t bfloat16_scratch(const Weight& w, int64_t rows, int64_t workers) {
  return bfloat16_tiles_scratch(w, rows, workers);
}

void bfloat16(const Weight& w, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel& parallel) {
  bfloat16_by_tiles(w, x, y, rows, scratch, parallel);
}

int64_t decoded_bfloat16_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  return eqquant::decoded_bfloat16_scratch<PairsInTiles>(w, rows, workers);
}

void decoded_bfloat16(const Blocks& w, const float* x, float* y, int64_t rows,
                      float* scratch, const Parallel& parallel) {
  eqquant::decoded_bfloat16<PairsInTiles>(w, x, y, rows, scratch, parallel);
}

}  // namespace amx
}  // namespace eqquant
