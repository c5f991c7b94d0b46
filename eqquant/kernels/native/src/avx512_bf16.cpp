// Kernels for AVX512 with bfloat16 products (AVX512_BF16).
#include "bfloat16.h"
#include "decoded_bfloat16.h"
#include "kernels.h"

namespace eqquant {
namespace avx512_bf16 {

int64_t bfloat16_scratch(const Weight& w, int64_t rows, int64_t workers) {
  return eqquant::bfloat16_scratch(w, rows, workers);
}

void bfloat16(const Weight& w, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel& parallel) {
  eqquant::bfloat16(w, x, y, rows, scratch, parallel);
}

int64_t decoded_bfloat16_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  return eqquant::decoded_bfloat16_scratch<PairsInRegisters>(w, rows, workers);
}

void decoded_bfloat16(const Blocks& w, const float* x, float* y, int64_t rows,
                      float* scratch, const Parallel& parallel) {
  eqquant::decoded_bfloat16<PairsInRegisters>(w, x, y, rows, scratch, parallel);
}

}  // namespace avx512_bf16
}  // namespace eqquant
