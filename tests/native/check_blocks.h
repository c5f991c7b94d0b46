// Compares the kernels for `Blocks` with plain sums in double precision.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks_case.h"
#include "compare.h"
#include "products/kernels.h"
#include "pool.h"
#include "xla/whole_products.h"

namespace eqquant {
namespace {

// Whether `y` is the product of `x` and numbers, each rounded by `round` first. Inputs
// may be off by `share` of the largest that is no outlier.
template <class Round>
bool is_product(const BlocksCase& c, bool transposed, const float* x, const float* y,
                Round round, double share = 0) {
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
      const double unit = 65 * share * mean_size(x + m * summed, summed);
      if (!close(y[m * columns + i], mine.data(), w, unit)) return false;
    }
  }
  return true;
}

// Products of integers of 16 bits, and of 8, of weights for which there are some.
void check_integers(const BlocksCase& c, const Kernels& kernels, const char* set,
                    const Pool& pool) {
  Blocks w = c.weight();
  const bool words = kernels.decoded_integers != nullptr;
  const bool digits = kernels.few_integers != nullptr;
  if (!(words || digits) || w.point_type == PointType::kE4M3 ||
      w.point_type == PointType::kE5M2)
    return;
  std::vector<float> points(w.points, w.points + 256);
  for (float& point : points) point /= BlocksCase::kUnit;
  if (w.point_type == PointType::kTable) w.points = points.data();
  const float unit = w.point_type == PointType::kTable ? BlocksCase::kUnit : 1;
  const auto x = c.inputs(c.k());
  const auto exactly = [](float x) { return static_cast<double>(x); };
  const auto fail = [&](const char* what) { report(set, what, [&] { c.print(); }); };
  // `share`: what inputs may be off by, of the largest that is no outlier.
  const auto check = [&](const char* what, double share, auto product) {
    const auto y = c.buffer(c.rows() * c.n()), again = c.buffer(c.rows() * c.n());
    const Pool alone(0);
    for (const Pool* some : {&pool, &alone})
      product(BlocksProducts<Guarded>(kernels, w, some->parallel()),
              some == &pool ? y.data() : again.data());
    if (std::memcmp(y.data(), again.data(), y.size() * sizeof(float)) != 0)
      fail("not the same on one thread");
    if (!is_product(c, false, x.data(), y.data(), exactly, share)) fail(what);
  };
  if (words)
    check("words", 0.51 / kMostWord, [&](const auto& product, float* y) {
      product.integers(x.data(), y, c.rows(), unit);
    });
  if (!digits || c.rows() > kFewPartRows || !kernels.has_fours(w)) return;
  check("three digits", 0.51 / (127.0 * 254 * 254), [&](const auto& product, float* y) {
    product.few_integers(x.data(), y, c.rows(), unit);
  });
}

void check_blocks(const Kernels& kernels, const char* set, const Pool& pool) {
  const BlocksCase c;
  check_integers(c, kernels, set, pool);
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
    // (A scale that is computed has an error in float32. Now and then a weight is
    // rounded to the other bfloat16, which is a 256th of it away.)
    double share = has_factor(w.scales.scale_type) ? 1.0 / (65 * 8192) : 0;
    // (Nor are sums of so many terms as exact as those of floats.)
    if (c.is_long()) share = 1e-3 / 65;
    if (!narrow ||
        !is_product(c, transposed, x.data(), y.data(), rounded_to_bfloat16, share))
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
  if (kernels.decoded_bfloat16 == nullptr || w.packing == Packing::kTrits) return;
  run("bfloat16", false, true, [&](const float* x, float* y, const Parallel& parallel) {
    const Guarded<float> scratch(
        kernels.decoded_bfloat16_scratch(w, c.rows(), parallel.workers));
    kernels.decoded_bfloat16(w, x, y, c.rows(), scratch.get(), parallel);
  });
}

}  // namespace
}  // namespace eqquant
