// What checks have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "random.h"

namespace eqquant {
namespace {

constexpr double bound = 1e-5;

int64_t failures = 0;

// How many sums were compared with exact ones, and by how much they differed from them,
// in relation to their terms: of those that are neither huge nor tiny.
int64_t compared = 0;
double largest_error = 0;

// Reports a failure of a case, which `print` describes.
template <class Print>
void report(const char* set, const char* what, Print print) {
  if (++failures > 10) return;  // The others are like these.
  std::printf("%s, %s: ", set, what);
  print();
}

// Whether `y` is close to a sum of products, relative to their absolute values.
//
// Numbers that are not normal are less exact, or taken as zeros: inputs, weights, and
// inputs times what codes stand for, before they are scaled.
//
// `unit`: what inputs may be off by.
bool close(float y, const double* x, const std::vector<double>& w, double unit = 0) {
  double sum = 0, size = 0, all = 1, rounded = 0;
  for (size_t j = 0; j < w.size(); ++j) {
    const double product = x[j] * w[j];
    sum += product;
    size += std::isfinite(product) ? std::abs(product) : 0;
    rounded += std::isfinite(w[j]) ? unit * std::abs(w[j]) : 0;
    all += std::abs(w[j]) + std::abs(x[j]);
  }
  if (std::isnan(sum)) return std::isnan(y);
  // In float32, so is what would be infinite then.
  if (size > 1e38) return true;
  if (std::isinf(sum)) return y == sum;
  const double error = std::abs(y - sum);
  ++compared;
  if (unit == 0 && error <= bound * size && size > 1e-30 * all)
    largest_error = std::max(largest_error, error / size);
  return error <= bound * size + rounded + 1e-36 * all;
}

// The geometric mean of the sizes of numbers, of those that are normal.
double mean_size(const float* x, int64_t k) {
  double total = 0, number = 0;
  for (int64_t i = 0; i < k; ++i)
    if (std::isnormal(x[i])) {
      total += std::log(std::abs(x[i]));
      ++number;
    }
  return number == 0 ? 0 : std::exp(total / number);
}

// Memory of exactly its size.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t size)
      : buffer_(size, size % 2 == 0 ? Place::kBeforeGuard : Place::kAfterGuard) {}
  T* get() const { return buffer_.data(); }
  bool failed() const { return false; }

 private:
  Buffer<T> buffer_;
};

}  // namespace
}  // namespace eqquant
