// Compares the kernels for `Blocks` with plain sums in double precision.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks_case.h"
#include "compare.h"
#include "kernels.h"
#include "pool.h"

namespace eqquant {
namespace {

// Whether `y` is the product of `x` and numbers, each rounded by `round` first.
template <class Round>
bool is_product(const BlocksCase& c, bool transposed, const float* x, const float* y,
                Round round) {
  const int64_t summed = transposed ? c.n() : c.k();
  const int64_t columns = transposed ? c.k() : c.n();
  std::vector<double> w(static_cast<size_t>(summed)), mine(w.size());
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < summed; ++j)
      w[static_cast<size_t>(j)] =
          round(static_cast<float>(transposed ? c.number(j, i) : c.number(i, j)));
    for (int64_t m = 0; m < c.rows(); ++m) {
      for (int64_t j = 0; j < summed; ++j)
        mine[static_cast<size_t>(j)] = round(x[m * summed + j]);
      if (!close(y[m * columns + i], mine.data(), w)) return false;
    }
  }
  return true;
}

void check_blocks(const Kernels& kernels, const char* set, const Pool& pool) {
  const BlocksCase c;
  const Blocks w = c.weight();
  const auto exactly = [](float x) { return static_cast<double>(x); };
  const auto fail = [&](const char* what) { report(set, what, [&] { c.print(); }); };
  const auto run = [&](const char* what, bool transposed, bool narrow, auto product) {
    const auto x = c.inputs(transposed ? c.n() : c.k());
    const auto y = c.buffer(c.rows() * (transposed ? c.k() : c.n()));
    const auto again = c.buffer(static_cast<int64_t>(y.size()));
    product(x.data(), y.data(), pool.parallel());
    const Pool alone(0);
    product(x.data(), again.data(), alone.parallel());
    if (std::memcmp(y.data(), again.data(), y.size() * sizeof(float)) != 0)
      fail("not the same on one thread");
    if (is_product(c, transposed, x.data(), y.data(), exactly)) return;
    if (!narrow || !is_product(c, transposed, x.data(), y.data(), rounded_to_bfloat16))
      fail(what);
  };
  run("decoded", false, false, [&](const float* x, float* y, const Parallel& parallel) {
    const Guarded<float> scratch(
        kernels.decoded_scratch(w, c.rows(), parallel.workers));
    kernels.decoded(w, x, y, c.rows(), scratch.get(), parallel);
  });
  run("transposed", true, false,
      [&](const float* x, float* y, const Parallel& parallel) {
        kernels.decoded_transposed(w, x, y, c.rows(), parallel);
      });
  if (kernels.decoded_bfloat16 == nullptr) return;
  run("bfloat16", false, true, [&](const float* x, float* y, const Parallel& parallel) {
    const Guarded<float> scratch(
        kernels.decoded_bfloat16_scratch(w, c.rows(), parallel.workers));
    kernels.decoded_bfloat16(w, x, y, c.rows(), scratch.get(), parallel);
  });
}

}  // namespace
}  // namespace eqquant
