// Compares products of random weights in trellis codes with plain sums in double
// precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "compare.h"
#include "pool.h"
#include "products/kernels.h"
#include "xla/whole_products.h"

namespace eqquant {
namespace {

class TrellisChecks {
 public:
  TrellisChecks(const Kernels& kernels, const char* set, const Pool& pool)
      : kernels_(kernels),
        set_(set),
        pool_(pool),
        bits_(static_cast<int32_t>(between(1, 8))),
        states_(static_cast<int32_t>(between(8, 16))),
        type_(static_cast<ScaleType>(between(0, 2))),
        // (Long rows, whose sums are added up in float64, take time to check.)
        is_long_(chance(0.03)),
        rows_(between(1, is_long_ || chance(0.5) ? 4 : chance(0.9) ? 20 : 200)),
        n_(between(1, is_long_ || chance(0.5) ? 40 : 200)),
        k_(is_long_      ? between(4000, 6000)
           : chance(0.5) ? between(1, 300)
                         : 32 * between(1, 20)),
        words_(divided_up(k_, 32) * bits_ * n_),
        scale_(bytes_of(type_) * n_) {
    for (int64_t i = 0; i < words_of_row() * n_; ++i)
      words_.get()[i] = static_cast<uint32_t>(random_bits());
    const int64_t odd = chance(0.2) ? between(0, n_ - 1) : -1;
    // (Of finite scales, no number overflows.)
    for (int64_t i = 0; i < n_; ++i)
      scales_.push_back(put_scale(i, i == odd ? strange() / 2 : std::exp(normal())));
    for (int64_t k = 0; k < k_; ++k)
      for (int64_t i = 0; i < n_; ++i) numbers_.push_back(point(k, i) * scales_[i]);
  }

  void check() const {
    compare("trellis", false, 0, [](const auto& whole, const float* x, float* y) {
      whole.trellis(x, y);
    });
    compare("trellis_across", true, 0, [](const auto& whole, const float* x, float* y) {
      whole.trellis_across(x, y);
    });
    if (kernels_.trellis_int16 != nullptr)
      compare("trellis_int16", false, 0.51 / kMostWord,
              [](const auto& whole, const float* x, float* y) {
                whole.trellis_int16(x, y);
              });
  }

 private:
  int64_t words_of_row() const { return divided_up(k_, 32) * bits_; }

  // Stores a scale, and returns it, rounded.
  double put_scale(int64_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type_ == ScaleType::kFloat32) {
      std::memcpy(scale_.get() + 4 * i, &bits, 4);
      return x;
    }
    // (Any 16 bits are a number. Float16 has 5 bits of exponent.)
    const auto half = static_cast<uint16_t>(
        type_ == ScaleType::kFloat16 ? between(0x1000, 0x7c01) : bits >> 16);
    std::memcpy(scale_.get() + 2 * i, &half, 2);
    return type_ == ScaleType::kFloat16 ? float16_to_double(half)
                                        : bfloat16_to_double(half);
  }

  // The point of number `k` of row `i`, bit by bit.
  double point(int64_t k, int64_t i) const {
    const int64_t first = k / 256 * 256 * bits_;
    const int64_t length = std::min<int64_t>(256 * bits_, words_of_row() * 32 - first);
    uint32_t state = 0;
    for (int64_t j = 0; j < states_; ++j) {
      const int64_t bit = first + (k % 256 * bits_ + j) % length;
      state |= (words_.get()[bit / 32 * n_ + i] >> (bit % 32) & 1) << j;
    }
    const uint32_t hash = state * 0x83DCD12Du;
    int sum = -510;
    for (int j = 0; j < 4; ++j) sum += hash >> (8 * j) & 255;
    return sum;
  }

  // `share`: what inputs may be off by, of the largest that is no outlier.
  template <class Product>
  void compare(const char* what, bool across, double share, Product product) const {
    const int64_t from = across ? n_ : k_, to = across ? k_ : n_;
    const Guarded<float> x(rows_ * from), y(rows_ * to), again(rows_ * to);
    for (int64_t m = 0; m < rows_; ++m) {
      float* const row = x.get() + m * from;
      const float size = chance(0.1) ? 1e30f : chance(0.1) ? 1e-30f : 1;
      for (int64_t i = 0; i < from; ++i) row[i] = size * normal();
      if (chance(0.3)) {
        const double often = chance(0.7) ? 0.02 : 0.1;
        for (int64_t i = 0; i < from; ++i)
          if (chance(often)) row[i] *= 1000;
      }
      if (chance(0.1)) row[between(0, from - 1)] = strange();
    }
    const TrellisWeight w = {
        words_.get(),
        {type_, scale_.get(), RowOrder::side_by_side(n_), false, {}},
        n_,
        k_,
        bits_,
        states_};
    const Pool alone(0);
    for (const Pool* some : {&pool_, &alone})
      product(TrellisProducts<Guarded>(kernels_, w, rows_, some->parallel()), x.get(),
              some == &pool_ ? y.get() : again.get());
    const auto bytes = static_cast<size_t>(rows_ * to) * sizeof(float);
    if (std::memcmp(y.get(), again.get(), bytes) != 0)
      return fail("not the same on one thread");
    std::vector<double> numbers(static_cast<size_t>(from)), row(numbers.size());
    for (int64_t m = 0; m < rows_; ++m) {
      std::copy_n(x.get() + m * from, from, row.begin());
      const double unit =
          share == 0 ? 0 : 65 * share * mean_size(x.get() + m * from, from);
      for (int64_t i = 0; i < to; ++i) {
        for (int64_t j = 0; j < from; ++j)
          numbers[static_cast<size_t>(j)] =
              static_cast<float>(numbers_[across ? i * n_ + j : j * n_ + i]);
        if (!close(y.get()[m * to + i], row.data(), numbers, unit)) return fail(what);
      }
    }
  }

  void fail(const char* what) const {
    report(set_, what, [&] {
      std::printf("bits %d, states %d, scales %d, rows %" PRId64 ", n %" PRId64
                  ", k %" PRId64 "\n",
                  bits_, states_, static_cast<int>(type_), rows_, n_, k_);
    });
  }

  const Kernels& kernels_;
  const char* set_;
  const Pool& pool_;
  const int32_t bits_, states_;
  const ScaleType type_;
  const bool is_long_;
  const int64_t rows_, n_, k_;
  const Guarded<uint32_t> words_;
  const Guarded<uint8_t> scale_;
  std::vector<double> scales_;
  std::vector<double> numbers_;  // [k, n]
};

}  // namespace
}  // namespace eqquant
