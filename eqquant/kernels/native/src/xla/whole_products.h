// Whole products, as combinations of kernels. Each returns false if memory ran out.
//
// `Memory<T>(number)` allocates an array: `get()` is its pointer, and `failed()` tells
// whether the allocation failed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "products/kernels.h"

namespace eqquant {
namespace {

// A row in which more than one input in `kOutlierShare` is an outlier is computed in
// float32: with so many outliers, integers would take about as long.
constexpr int64_t kOutlierShare = 16;

// Computes the `left` of `rows` rows that have no digits, by `exact(some_x, some_y)` of
// copies of these.
template <template <class> class Memory, class Exact>
bool without_digits(const float* x, int64_t k, float* y, int64_t n,
                    const int32_t* outliers, int64_t rows, int64_t left, Exact exact) {
  const Memory<float> some_x(left * k), some_y(left * n);
  if (some_x.failed() || some_y.failed()) return false;
  const auto over = [&](auto copy) {
    for (int64_t m = 0, i = 0; m < rows; ++m)
      if (outliers[m] == kNoDigits) copy(m, i++);
  };
  over([&](int64_t m, int64_t i) { std::copy_n(x + m * k, k, some_x.get() + i * k); });
  if (!exact(some_x.get(), some_y.get())) return false;
  over([&](int64_t m, int64_t i) { std::copy_n(some_y.get() + i * n, n, y + m * n); });
  return true;
}

template <template <class> class Memory>
class Products {
 public:
  Products(const Kernels& kernels, const Weight& w, int64_t rows, Parallel parallel)
      : kernels_(kernels), w_(w), rows_(rows), parallel_(parallel) {}

  bool forward(const float* x, float* y) const {
    if (!exact(x, y, rows_)) return false;
    mend({x, k(), nullptr, nullptr}, y);
    return true;
  }

  bool transposed(const float* x, float* y, int64_t k) const {
    kernels_.transposed(w_, x, y, rows_, k, parallel_);
    kernels_.mend_transposed(w_, x, y, rows_, k, parallel_);
    return true;
  }

  bool bfloat16(const float* x, float* y) const {
    const Memory<float> scratch(
        kernels_.bfloat16_scratch(w_, rows_, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.bfloat16(w_, x, y, rows_, scratch.get(), parallel_);
    mend({x, k(), nullptr, nullptr}, y);
    return true;
  }

  // Quantizes `x` to two digits.
  bool integers(const float* x, float* y) const {
    const int64_t stride = codes_of(w_.kind, w_.bytes), most = k() / kOutlierShare;
    const Memory<int8_t> digit(2 * rows_ * stride);
    const Memory<float> unit(rows_);
    const Memory<int32_t> number(rows_);
    const Memory<Outlier> outlier(rows_ * most);
    if (digit.failed() || unit.failed() || number.failed() || outlier.failed())
      return false;
    Digits digits = {2,          rows_, stride,  digit.get(),
                     unit.get(), most,  nullptr, outlier.get()};
    kernels_.to_digits(x, k(), digits, digit.get(), unit.get(), number.get(),
                       outlier.get(), parallel_);
    int64_t left = 0;
    for (int64_t m = 0; m < rows_; ++m) {
      if (number.get()[m] > 0) digits.outliers = number.get();
      if (number.get()[m] == kNoDigits) ++left;
    }
    if (left == rows_) return forward(x, y);
    if (!of_digits(digits, y)) return false;
    const auto floats = [&](const float* some_x, float* some_y) {
      return exact(some_x, some_y, left);
    };
    if (left > 0 && !without_digits<Memory>(x, k(), y, w_.n, number.get(), rows_, left,
                                            floats))
      return false;
    mend({x, k(), nullptr, nullptr}, y);
    return true;
  }

  // Takes `x` as one digit: `x[m, k] = unit[m] * digit[m, k]`.
  bool rounded(const int8_t* digit, const float* unit, float* y) const {
    const int64_t stride = codes_of(w_.kind, w_.bytes);
    if (!of_digits({1, rows_, stride, digit, unit, 0, nullptr, nullptr}, y))
      return false;
    mend({nullptr, stride, digit, unit}, y);
    return true;
  }

 private:
  int64_t k() const { return w_.bytes * codes_per_byte(w_.kind); }

  void mend(const AnyRows& x, float* y) const {
    kernels_.mend(w_, x, y, rows_, parallel_);
  }

  bool exact(const float* x, float* y, int64_t rows) const {
    const Memory<float> scratch(kernels_.forward_scratch(w_, rows));
    if (scratch.failed()) return false;
    kernels_.forward(w_, x, y, rows, scratch.get(), parallel_);
    return true;
  }

  bool of_digits(const Digits& x, float* y) const {
    const Memory<float> scratch(kernels_.integers_scratch(w_, x, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.integers(w_, x, y, scratch.get(), parallel_);
    return true;
  }

  const Kernels& kernels_;
  const Weight& w_;
  int64_t rows_;
  Parallel parallel_;
};

// Products of `Blocks` along their blocks.
template <template <class> class Memory>
class BlocksProducts {
 public:
  BlocksProducts(const Kernels& kernels, const Blocks& w, Parallel parallel)
      : kernels_(kernels), w_(w), parallel_(parallel) {}

  bool floats(const float* x, float* y, int64_t rows) const {
    const Memory<float> scratch(
        kernels_.decoded_scratch(w_, rows, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.decoded(w_, x, y, rows, scratch.get(), parallel_);
    return true;
  }

  bool bfloat16(const float* x, float* y, int64_t rows) const {
    const Memory<float> scratch(
        kernels_.decoded_bfloat16_scratch(w_, rows, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.decoded_bfloat16(w_, x, y, rows, scratch.get(), parallel_);
    return true;
  }

  // Rounds `x` to 16-bit integers. A point of the table is `unit` times as large.
  bool integers(const float* x, float* y, int64_t rows, float unit) const {
    const int64_t stride = divided_up(w_.k, 64) * 64, most = w_.k / kOutlierShare;
    const bool minima = w_.offset == Offset::kMinimum;
    const Memory<int16_t> word(rows * stride);
    const Memory<float> sums(minima ? rows * stride / 16 : 0);
    const Memory<float> units(rows);
    const Memory<int32_t> outliers(rows);
    const Memory<Outlier> outlier(rows * most);
    const Memory<float> scratch(
        kernels_.decoded_integers_scratch(w_, rows, parallel_.workers));
    if (word.failed() || sums.failed() || units.failed() || outliers.failed() ||
        outlier.failed() || scratch.failed())
      return false;
    float* const of_sixteen = minima ? sums.get() : nullptr;
    Words words = {rows,        stride, word.get(), of_sixteen,
                   units.get(), most,   nullptr,    outlier.get()};
    kernels_.to_words(w_, x, unit, words, word.get(), of_sixteen, units.get(),
                      outliers.get(), outlier.get(), parallel_);
    for (int64_t m = 0; m < rows; ++m)
      if (outliers.get()[m] > 0) words.outliers = outliers.get();
    kernels_.decoded_integers(w_, words, unit, y, scratch.get(), parallel_);
    return mend(x, y, rows, unit, outliers.get());
  }

  // Splits `x` into parts of 8-bit digits. A point of the table is `unit` times as
  // large. For weights that have `fours`, and at most `kFewPartRows` rows.
  bool few_integers(const float* x, float* y, int64_t rows, float unit) const {
    const int64_t stride = divided_up(w_.k, 64) * 64;
    const Memory<int8_t> digit(2 * rows * 3 * stride);
    const Memory<float> units(2 * rows);
    const Memory<int32_t> before(2 * rows * 3 * (stride / 16 + 1));
    const Memory<int64_t> row(2 * rows);
    const Memory<int32_t> none(rows);
    if (digit.failed() || units.failed() || before.failed() || row.failed() ||
        none.failed())
      return false;
    const int64_t number =
        kernels_.to_parts(w_, x, rows, unit, stride, digit.get(), units.get(),
                          before.get(), row.get(), none.get(), parallel_);
    if (number > 0) {
      const Memory<float> scratch(
          kernels_.few_integers_scratch(w_, number, parallel_.workers));
      if (scratch.failed()) return false;
      const RowParts parts = {number,      stride,       digit.get(),
                              units.get(), before.get(), row.get()};
      kernels_.few_integers(w_, parts, unit, y, scratch.get(), parallel_);
    }
    return mend(x, y, rows, unit, none.get());
  }

 private:
  // Computes in float32 what integers leave. A point of the table is `unit` times as
  // large.
  bool mend(const float* x, float* y, int64_t rows, float unit,
            int32_t* outliers) const {
    float points[256];
    for (int i = 0; i < 256; ++i) points[i] = unit * w_.points[i];
    Blocks w = w_;
    w.points = points;
    return BlocksProducts(kernels_, w, parallel_).mend_rows(x, y, rows, outliers);
  }

  // Computes rows without digits or words in float32, and those that have sums which
  // are not finite: scaled sums may be so where sums of scaled numbers are not.
  bool mend_rows(const float* x, float* y, int64_t rows, int32_t* outliers) const {
    parallel_(rows, [&](int64_t m, int64_t) {
      // (Of bits, so that the compiler makes vectors of them.)
      uint32_t largest = 0;
      for (int64_t i = 0; i < w_.n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, y + m * w_.n + i, 4);
        largest = std::max(largest, bits & 0x7fffffff);
      }
      if (largest >= 0x7f800000) outliers[m] = kNoDigits;
    });
    const int64_t left = std::count(outliers, outliers + rows, kNoDigits);
    if (left == 0) return true;
    if (left == rows) return floats(x, y, rows);
    return without_digits<Memory>(
        x, w_.k, y, w_.n, outliers, rows, left,
        [&](const float* some_x, float* some_y) {
          return floats(some_x, some_y, left);
        });
  }

  const Kernels& kernels_;
  const Blocks& w_;
  Parallel parallel_;
};

}  // namespace
}  // namespace eqquant
