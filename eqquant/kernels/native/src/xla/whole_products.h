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

// Copies a row of inputs.
inline auto copies(const float* x, int64_t columns) {
  return [=](int64_t m, float* to) { std::copy_n(x + m * columns, columns, to); };
}

// Computes in float32, by `product(x, y, rows)`, the rows without digits or words, and
// rows with sums that are not finite: scaled sums may not be finite where sums of
// scaled numbers are. `row(m, to)` copies the `k` inputs of a row.
template <template <class> class Memory, class Row, class Product>
bool mend_rows(const Parallel& parallel, int64_t rows, Row row, int64_t k, float* y,
               int64_t n, int32_t* outliers, Product product) {
  const int64_t each = larger(1, kCheckedResults / n);
  parallel(divided_up(rows, each), [&](int64_t task, int64_t) {
    for (int64_t m = task * each; m < smaller((task + 1) * each, rows); ++m)
      if (!are_finite(y + m * n, n)) outliers[m] = kNoDigits;
  });
  const int64_t left = std::count(outliers, outliers + rows, kNoDigits);
  if (left == 0) return true;
  const Memory<float> some_x(left * k), some_y(left * n);
  if (some_x.failed() || some_y.failed()) return false;
  const auto over = [&](auto copy) {
    for (int64_t m = 0, i = 0; m < rows; ++m)
      if (outliers[m] == kNoDigits) copy(m, i++);
  };
  over([&](int64_t m, int64_t i) { row(m, some_x.get() + i * k); });
  if (!product(some_x.get(), some_y.get(), left)) return false;
  over([&](int64_t m, int64_t i) { std::copy_n(some_y.get() + i * n, n, y + m * n); });
  return true;
}

// Rows of inputs as words, in their memory, which a kernel writes.
template <template <class> class Memory>
struct WordsInMemory {
  Memory<int16_t> word;
  Memory<float> sums, unit;
  Memory<int32_t> outliers;
  Memory<Outlier> outlier;
  Words words;

  // `has_sums`: whether the sums of words are needed, too.
  WordsInMemory(int64_t rows, int64_t k, bool has_sums)
      : WordsInMemory(rows, divided_up(k, 64) * 64, k / kOutlierShare, has_sums) {}

  bool failed() const {
    return word.failed() || sums.failed() || unit.failed() || outliers.failed() ||
           outlier.failed();
  }

  // Call this after the kernel.
  void written() {
    for (int64_t m = 0; m < words.rows; ++m)
      if (outliers.get()[m] > 0) words.outliers = outliers.get();
  }

 private:
  WordsInMemory(int64_t rows, int64_t stride, int64_t most, bool has_sums)
      : word(rows * stride),
        sums(has_sums ? rows * stride / 16 : 0),
        unit(rows),
        outliers(rows),
        outlier(rows * most),
        words{rows,       stride, word.get(), has_sums ? sums.get() : nullptr,
              unit.get(), most,   nullptr,    outlier.get()} {}
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
    const bool minima = w_.offset == Offset::kMinimum;
    WordsInMemory<Memory> in(rows_, w_.k, minima);
    const Memory<float> scratch(kernels_.int16_scratch(w_, rows_, parallel_.workers));
    if (in.failed() || scratch.failed()) return false;
    kernels_.to_words(w_, x, unit, in.words, in.word.get(),
                      minima ? in.sums.get() : nullptr, in.unit.get(),
                      in.outliers.get(), in.outlier.get(), parallel_);
    in.written();
    kernels_.int16(w_, in.words, unit, y, scratch.get(), parallel_);
    return mend(x, y, in.outliers.get(), unit);
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
    return mend_rows<Memory>(
        parallel_, rows_, copies(x, w_.n), w_.n, y, w_.k, none.get(),
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
    return mend_rows<Memory>(
        parallel_, rows_, row, w_.k, y, w_.n, outliers,
        [&](const float* some_x, float* some_y, int64_t rows) {
          return exact(w, some_x, some_y, rows);
        });
  }

  const Kernels& kernels_;
  const Blocks& w_;
  int64_t rows_;
  Parallel parallel_;
};

// The same of weights in trellis codes.
template <template <class> class Memory>
class TrellisProducts {
 public:
  TrellisProducts(const Kernels& kernels, const TrellisWeight& w, int64_t rows,
                  Parallel parallel)
      : kernels_(kernels), w_(w), rows_(rows), parallel_(parallel) {}

  bool trellis(const float* x, float* y) const {
    if (rows_ > 1) return exact(x, y, rows_);
    const Padded<Memory, float> whole(x, 1, w_.k,
                                      divided_up(w_.k, kWholeNumbers) * kWholeNumbers);
    const Memory<float> scratch(kernels_.trellis_row_scratch(w_, parallel_.workers));
    if (whole.failed() || scratch.failed()) return false;
    kernels_.trellis_row(w_, whole.get(), y, scratch.get(), parallel_);
    int32_t none = 0;
    return mend(x, y, &none);
  }

  bool trellis_across(const float* x, float* y) const {
    kernels_.trellis_across(w_, x, y, rows_, parallel_);
    return true;
  }

  // Rounds `x` to 16-bit integers.
  bool trellis_int16(const float* x, float* y) const {
    WordsInMemory<Memory> in(rows_, w_.k, false);
    const Memory<float> scratch(
        kernels_.trellis_int16_scratch(w_, rows_, parallel_.workers));
    if (in.failed() || scratch.failed()) return false;
    kernels_.trellis_to_words(w_, x, in.words, in.word.get(), in.unit.get(),
                              in.outliers.get(), in.outlier.get(), parallel_);
    in.written();
    kernels_.trellis_int16(w_, in.words, y, scratch.get(), parallel_);
    return mend(x, y, in.outliers.get());
  }

 private:
  bool exact(const float* x, float* y, int64_t rows) const {
    const Memory<float> scratch(
        kernels_.trellis_scratch(w_, rows, parallel_.workers));
    if (scratch.failed()) return false;
    kernels_.trellis(w_, x, y, rows, scratch.get(), parallel_);
    return true;
  }

  bool mend(const float* x, float* y, int32_t* outliers) const {
    return mend_rows<Memory>(
        parallel_, rows_, copies(x, w_.k), w_.k, y, w_.n, outliers,
        [&](const float* some_x, float* some_y, int64_t rows) {
          return exact(some_x, some_y, rows);
        });
  }

  const Kernels& kernels_;
  const TrellisWeight& w_;
  int64_t rows_;
  Parallel parallel_;
};

}  // namespace
}  // namespace eqquant
