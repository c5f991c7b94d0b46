// Products by a few rows of inputs, in float32.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/panel_reader.h"

namespace eqquant {
namespace {

// The largest number of rows whose sums are scaled.
constexpr int64_t kFewRows = 4;

// A few rows of inputs, and the sum of each 16 inputs, which is multiplied by `rest`.
struct FewInputs {
  const float* x;     // [rows, k]
  const float* sums;  // [rows, divided_up(k, 16)]; null if there are no minima
  int64_t k;

  static int64_t number(const Blocks& w, int64_t rows) {
    const bool minima = w.offset == Offset::kMinimum && rows <= kFewRows;
    return minima ? rows * divided_up(w.k, kRun) : 0;
  }
  static void sum_up(const Blocks& w, const float* x, int64_t rows, float* sums) {
    if (number(w, rows) == 0) return;
    for (int64_t r = 0; r < rows; ++r, x += w.k)
      for (int64_t k = 0; k < w.k; k += kRun, ++sums) {
        *sums = 0;
        for (int64_t j = k; j < smaller(k + kRun, w.k); ++j) *sums += x[j];
      }
  }
  // Returns the sum of the inputs of row `r` from `first`, a multiple of 16, to `last`.
  float sum(int64_t r, int64_t first, int64_t last) const {
    const float* const mine = sums + r * divided_up(k, kRun);
    float found = 0;
    for (int64_t i = first / kRun; i * kRun < last; ++i) found += mine[i];
    return found;
  }
};

}  // namespace
}  // namespace eqquant
