// Whole products, as combinations of kernels. Each returns false if memory ran out.
//
// `Memory<T>(number)` allocates an array: `get()` is its pointer, and `failed()` is
// true if the allocation failed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "products/kernels.h"

namespace eqquant {
namespace {

// A row in which more than one input in `kOutlierShare` is an outlier is computed in
// float32: with this many outliers, integers would take about as long.
constexpr int64_t kOutlierShare = 16;

// The number of results that a task checks (at least one row).
constexpr int64_t kCheckedResults = 1 << 14;

inline bool are_finite(const float* y, int64_t n) {
  // (On bits, so that the compiler vectorizes the loop.)
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, y + i, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest < 0x7f800000;
}

// Rows of `k` inputs, padded with zeros to `columns`.
template <template <class> class Memory, class T>
class Padded {
 public:
  Padded(const T* x, int64_t rows, int64_t k, int64_t columns)
      : x_(x), copy_(columns == k ? 0 : rows * columns) {
    if (columns == k || copy_.failed()) return;
    for (int64_t m = 0; m < rows; ++m) {
      T* const to = copy_.get() + m * columns;
      std::fill(std::copy_n(x + m * k, k, to), to + columns, T{0});
    }
    x_ = copy_.get();
  }

  const T* get() const { return x_; }
  bool failed() const { return copy_.failed(); }

 private:
  const T* x_;
  Memory<T> copy_;
};

template <template <class> class Memory>
class Products {
 public:
  Products(const Kernels& kernels, const Blocks& w, int64_t rows, Parallel parallel)
      : kernels_(kernels), w_(w), rows_(rows), parallel_(parallel) {}

  bool float32(const float* x, float* y) const { return exact(w_, x, y, rows_); }

  bool float32_across(const float* x, float* y) const {
    kernels_.float32_across(w_, x, y, rows_, parallel_);
    return true;
  }

  bool bfloat16(const float* x, float* y) const {
    const Memory<float> scratch(
        kernels_.bfloat16_scratch(w_, rows_, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.bfloat16(w_, x, y, rows_, scratch.get(), parallel_);
    return true;
  }

  // Rounds `x` to 16-bit integers. The points of the table are scaled by `unit`.
  bool int16(const float* x, float* y, float unit) const {
    const int64_t stride = divided_up(w_.k, 64) * 64, most = w_.k / kOutlierShare;
    const bool minima = w_.offset == Offset::kMinimum;
    const Memory<int16_t> word(rows_ * stride);
    const Memory<float> sums(minima ? rows_ * stride / 16 : 0);
    const Memory<float> units(rows_);
    const Memory<int32_t> outliers(rows_);
    const Memory<Outlier> outlier(rows_ * most);
    const Memory<float> scratch(kernels_.int16_scratch(w_, rows_, parallel_.workers));
    if (word.failed() || sums.failed() || units.failed() || outliers.failed() ||
        outlier.failed() || scratch.failed())
      return false;
    float* const of_sixteen = minima ? sums.get() : nullptr;
    Words words = {rows_,       stride, word.get(), of_sixteen,
                   units.get(), most,   nullptr,    outlier.get()};
    kernels_.to_words(w_, x, unit, words, word.get(), of_sixteen, units.get(),
                      outliers.get(), outlier.get(), parallel_);
    for (int64_t m = 0; m < rows_; ++m)
      if (outliers.get()[m] > 0) words.outliers = outliers.get();
    kernels_.int16(w_, words, unit, y, scratch.get(), parallel_);
    return mend(x, y, outliers.get(), unit);
  }

  // Splits `x` into parts of 8-bit digits. The points of the table are scaled by
  // `unit`. For weights that have `fours`, and at most `kFewPartRows` rows.
  bool int8_few_rows(const float* x, float* y, float unit) const {
    const int64_t stride = divided_up(w_.k, 64) * 64;
    const Memory<int8_t> digit(2 * rows_ * 3 * stride);
    const Memory<float> units(2 * rows_);
    const Memory<int32_t> before(2 * rows_ * 3 * (stride / 16 + 1));
    const Memory<int64_t> row(2 * rows_);
    const Memory<int32_t> none(rows_);
    if (digit.failed() || units.failed() || before.failed() || row.failed() ||
        none.failed())
      return false;
    const int64_t number =
        kernels_.to_parts(w_, x, rows_, unit, stride, digit.get(), units.get(),
                          before.get(), row.get(), none.get(), parallel_);
    if (number > 0) {
      const Memory<float> scratch(
          kernels_.int8_few_rows_scratch(w_, number, parallel_.workers));
      if (scratch.failed()) return false;
      const RowParts parts = {number,      stride,       digit.get(),
                              units.get(), before.get(), row.get()};
      kernels_.int8_few_rows(w_, parts, unit, y, scratch.get(), parallel_);
    }
    return mend(x, y, none.get(), unit);
  }

  bool lookup_tables(const float* x, float* y) const {
    const Padded<Memory, float> whole(x, rows_, w_.k, codes());
    const Memory<float> scratch(kernels_.lookup_tables_scratch(w_, rows_));
    if (whole.failed() || scratch.failed()) return false;
    kernels_.lookup_tables(w_, whole.get(), y, rows_, scratch.get(), parallel_);
    return mend(x, y);
  }

  bool transposed(const float* x, float* y) const {
    kernels_.transposed(w_, x, y, rows_, parallel_);
    const Memory<int32_t> none(rows_);
    if (none.failed()) return false;
    std::fill_n(none.get(), rows_, 0);
    return mend_rows(copies(x, w_.n), w_.n, y, w_.k, none.get(),
                     [&](const float* some_x, float* some_y, int64_t rows) {
                       kernels_.float32_across(w_, some_x, some_y, rows, parallel_);
                       return true;
                     });
  }

  bool bfloat16_nibbles(const float* x, float* y) const {
    const Padded<Memory, float> whole(x, rows_, w_.k, codes());
    const Memory<float> scratch(
        kernels_.bfloat16_nibbles_scratch(w_, rows_, parallel_.workers));
    if (whole.failed() || scratch.failed()) return false;
    kernels_.bfloat16_nibbles(w_, whole.get(), y, rows_, scratch.get(), parallel_);
    return mend(x, y);
  }

  // Rounds `x` to two digits.
  bool int8(const float* x, float* y) const {
    const int64_t stride = codes_in_fours(), most = w_.k / kOutlierShare;
    const Memory<int8_t> digit(2 * rows_ * stride);
    const Memory<float> unit(rows_);
    const Memory<int32_t> outliers(rows_);
    const Memory<Outlier> outlier(rows_ * most);
    if (digit.failed() || unit.failed() || outliers.failed() || outlier.failed())
      return false;
    Digits digits = {2,          rows_, stride,  digit.get(),
                     unit.get(), most,  nullptr, outlier.get()};
    kernels_.to_digits(x, w_.k, digits, digit.get(), unit.get(), outliers.get(),
                       outlier.get(), parallel_);
    for (int64_t m = 0; m < rows_; ++m)
      if (outliers.get()[m] > 0) digits.outliers = outliers.get();
    return of_digits(digits, y) && mend(x, y, outliers.get());
  }

  // Takes `x` as one digit: `x[m, k] = unit[m] * digit[m, k]`.
  bool int8(const int8_t* digit, const float* unit, float* y) const {
    const Padded<Memory, int8_t> whole(digit, rows_, w_.k, codes_in_fours());
    const Memory<int32_t> none(rows_);
    if (whole.failed() || none.failed() ||
        !of_digits({1, rows_, codes_in_fours(), whole.get(), unit, 0, nullptr, nullptr},
                   y))
      return false;
    std::fill_n(none.get(), rows_, 0);
    const auto row = [&](int64_t m, float* to) {
      for (int64_t i = 0; i < w_.k; ++i)
        to[i] = unit[m] * static_cast<float>(digit[m * w_.k + i]);
    };
    return mend_along(row, y, none.get(), w_);
  }

 private:
  // The number of codes that fit in the bytes of a row, and the same in whole fours.
  int64_t codes() const { return w_.in_bytes.row * codes_per_byte(w_.packing); }
  int64_t codes_in_fours() const { return codes_of(w_.packing, w_.in_bytes.row); }

  bool of_digits(const Digits& x, float* y) const {
    const Memory<float> scratch(kernels_.int8_scratch(w_, x, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.int8(w_, x, y, scratch.get(), parallel_);
    return true;
  }

  bool exact(const Blocks& w, const float* x, float* y, int64_t rows) const {
    const Memory<float> scratch(kernels_.float32_scratch(w, rows, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.float32(w, x, y, rows, scratch.get(), parallel_);
    return true;
  }

  // Copies a row of inputs.
  static auto copies(const float* x, int64_t columns) {
    return [=](int64_t m, float* to) { std::copy_n(x + m * columns, columns, to); };
  }

  bool mend(const float* x, float* y) const {
    const Memory<int32_t> none(rows_);
    if (none.failed()) return false;
    std::fill_n(none.get(), rows_, 0);
    return mend(x, y, none.get());
  }

  // The same for a weight whose points are scaled by `unit`.
  bool mend(const float* x, float* y, int32_t* outliers, float unit = 1) const {
    float points[256];
    for (int i = 0; i < 256; ++i) points[i] = unit * w_.points[i];
    Blocks w = w_;
    w.points = points;
    return mend_along(copies(x, w_.k), y, outliers, w);
  }

  template <class Row>
  bool mend_along(Row row, float* y, int32_t* outliers, const Blocks& w) const {
    return mend_rows(row, w_.k, y, w_.n, outliers,
                     [&](const float* some_x, float* some_y, int64_t rows) {
                       return exact(w, some_x, some_y, rows);
                     });
  }

  // Computes in float32, by `product(x, y, rows)`, the rows without digits or words,
  // and rows with sums that are not finite: scaled sums may not be finite where sums of
  // scaled numbers are. `row(m, to)` copies the `k` inputs of a row.
  template <class Row, class Product>
  bool mend_rows(Row row, int64_t k, float* y, int64_t n, int32_t* outliers,
                 Product product) const {
    const int64_t each = larger(1, kCheckedResults / n);
    parallel_(divided_up(rows_, each), [&](int64_t task, int64_t) {
      for (int64_t m = task * each; m < smaller((task + 1) * each, rows_); ++m)
        if (!are_finite(y + m * n, n)) outliers[m] = kNoDigits;
    });
    const int64_t left = std::count(outliers, outliers + rows_, kNoDigits);
    if (left == 0) return true;
    const Memory<float> some_x(left * k), some_y(left * n);
    if (some_x.failed() || some_y.failed()) return false;
    const auto over = [&](auto copy) {
      for (int64_t m = 0, i = 0; m < rows_; ++m)
        if (outliers[m] == kNoDigits) copy(m, i++);
    };
    over([&](int64_t m, int64_t i) { row(m, some_x.get() + i * k); });
    if (!product(some_x.get(), some_y.get(), left)) return false;
    over(
        [&](int64_t m, int64_t i) { std::copy_n(some_y.get() + i * n, n, y + m * n); });
    return true;
  }

  const Kernels& kernels_;
  const Blocks& w_;
  int64_t rows_;
  Parallel parallel_;
};

}  // namespace
}  // namespace eqquant
