// Sums of any number of terms. The error of a float32 sum grows with the number of
// terms, so sums of a limited number are added up in float64.
#pragma once

#include <cstdint>

#include "products/kernels.h"

namespace eqquant {
namespace {

// The least number of codes after which sums are added up in float64. Sums of fewer
// codes need no memory for this.
constexpr int64_t kLeastSummed = 512;

// Returns the number of codes of a row after which sums are added up, if there are a
// few additions for each block, or for each 64 codes of a longer one. (The smallest
// blocks have 16 codes.)
inline int64_t summed_codes(const Blocks& w) {
  const int64_t size = is_gguf(w.packing) ? 16 : w.block;
  return kLeastSummed / 16 * larger(16, smaller(size, 64));
}

// Sums in float32 that kernels add to, and their totals in float64.
template <class V>
class LongSums {
 public:
  // The number of floats that `sums` sums of `codes` codes need.
  static constexpr int64_t floats(int64_t sums, int64_t codes) {
    return codes > kLeastSummed ? 3 * sums : sums;
  }

  // `rows` rows of `columns` sums, `stride` apart. `wide` has two floats for each of
  // them, if there are more codes than `kLeastSummed`. `each`: the number of codes that
  // are summed in float32.
  LongSums(float* sums, int64_t rows, int64_t columns, int64_t stride, float* wide,
           int64_t codes, int64_t each)
      : sums_(sums),
        rows_(rows),
        columns_(columns),
        stride_(stride),
        wide_(wide),
        codes_(codes),
        each_(each) {}

  // `number` sums, initially zero, followed by the floats that they need besides.
  LongSums(float* sums, int64_t number, int64_t codes, int64_t each)
      : LongSums(sums, 1, number, 0, sums + number, codes, each) {
    for (int64_t i = 0; i < number; ++i) sums[i] = 0;
  }

  // Call this when the codes before `k` have been added.
  void reach(int64_t k) {
    if (k - kept_ < each_ || k >= codes_) return;
    keep(kept_ == 0);
    kept_ = k;
  }

  // Call this when all codes have been added: the sums are then complete.
  void finish() {
    if (kept_ > 0) narrow();
  }

 private:
  EQQUANT_INNERMOST void keep(bool first) const {
    over([&](float* sum, float* wide, int64_t count) {
      const auto x = V::load(sum, count);
      V::store_wide(wide, first ? V::wide(x) : V::add(V::load_wide(wide), x));
      V::store(sum, V::zero(), count);
    });
  }

  EQQUANT_INNERMOST void narrow() const {
    over([&](float* sum, const float* wide, int64_t count) {
      const auto x = V::load(sum, count);
      V::store(sum, V::narrow(V::add(V::load_wide(wide), x)), count);
    });
  }

  template <class F>
  void over(F f) const {
    constexpr int64_t W = V::width;
    float* wide = wide_;
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t i = 0; i < columns_; i += W, wide += 2 * W)
        f(sums_ + r * stride_ + i, wide, smaller(W, columns_ - i));
  }

  float* sums_;
  int64_t rows_, columns_, stride_;
  float* wide_;
  int64_t codes_, each_;
  int64_t kept_ = 0;  // the number of codes that were added up in float64
};

}  // namespace
}  // namespace eqquant
