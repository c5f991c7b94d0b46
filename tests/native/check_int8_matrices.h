// Compares products of matrices of 8-bit integers with sums in 64 bits: no bit may
// differ.
#pragma once

#include <cstdint>
#include <cstdio>

#include "compare.h"
#include "pool.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

void check_int8_matrices(const Kernels& kernels, const char* set, const Pool& pool) {
  if (kernels.int8_matrices == nullptr) return;
  const int64_t rows = between(1, chance(0.1) ? 400 : 20), n = between(1, 50);
  const int64_t k = between(1, chance(0.1) ? 3000 : 70);
  const bool across = chance(0.5);
  const Guarded<int8_t> x(rows * k), w(n * k);
  const Guarded<float> y(rows * n);
  // Sometimes nothing but ends.
  const bool ends = chance(0.3);
  const auto any = [&] {
    const int64_t most[] = {-128, -127, 127};
    return static_cast<int8_t>(ends ? most[between(0, 2)] : between(-128, 127));
  };
  for (int64_t i = 0; i < rows * k; ++i) x.get()[i] = any();
  for (int64_t i = 0; i < n * k; ++i) w.get()[i] = any();
  kernels.int8_matrices({x.get(), w.get(), y.get(), rows, n, k, across},
                        pool.parallel());
  for (int64_t i = 0; i < rows * n; ++i) {
    int64_t sum = 0;
    for (int64_t j = 0; j < k; ++j)
      sum += int64_t{x.get()[i / n * k + j]} *
             w.get()[across ? j * n + i % n : i % n * k + j];
    if (y.get()[i] == static_cast<float>(sum)) continue;
    return report(set, "int8_matrices", [&] {
      std::printf("rows %" PRId64 ", n %" PRId64 ", k %" PRId64 ", across %d\n", rows,
                  n, k, across);
    });
  }
}

}  // namespace
}  // namespace eqquant
