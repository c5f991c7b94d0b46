// Products of weights across their blocks, in float32, from the decoded numbers:
// `y[m, k] = x[m, n] @ W[n, k]`.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/panel_reader.h"

namespace eqquant {
namespace {

// The number of rows of inputs for which numbers are decoded once.
constexpr int64_t kAcrossRows = 16;

// The number of rows of the weight, in each lane, after which sums are added up in
// float64, so that rounding errors do not build up.
constexpr int64_t kAcrossSummed = 128;

template <class V>
class Across {
 public:
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;
  static constexpr int kTogether = V::registers / 8;

  Across(const Blocks& w, const float* x, float* y, int64_t rows)
      : w_(w), numbers_(w), x_(x), y_(y), rows_(rows) {}

  int64_t pieces() const { return numbers_.pieces(); }

  // Computes the results for the codes of piece `i`.
  void piece(int64_t i) const {
    for (int64_t m = 0; m < rows_; m += kAcrossRows)
      some(i, m, smaller(kAcrossRows, rows_ - m));
  }

 private:
  void some(int64_t i, int64_t m, int64_t rows) const {
    alignas(64) float sums[kAcrossRows * kPieceCodes * W] = {};
    double totals[kAcrossRows * kPieceCodes] = {};
    alignas(64) float panel[kPieceCodes * kRows];
    Piece<V> piece;
    for (int64_t n = 0; n < w_.n; n += kRows) {
      const int64_t count = smaller(kRows, w_.n - n);
      numbers_.unpack(i, n, count, piece);
      numbers_.decode(piece, 0, piece.number, panel);
      int64_t r = 0;
      for (; r + kTogether <= rows; r += kTogether)
        add<kTogether>(panel, piece.number, m + r, n, count,
                       sums + r * kPieceCodes * W);
      for (; r < rows; ++r)
        add<1>(panel, piece.number, m + r, n, count, sums + r * kPieceCodes * W);
      const int64_t next = n + kRows;
      if (next % (kAcrossSummed * W) != 0 && next < w_.n) continue;
      for (r = 0; r < rows; ++r)
        for (int64_t k = r * kPieceCodes; k < r * kPieceCodes + piece.number; ++k) {
          totals[k] += V::sum(V::load(sums + k * W));
          V::store(sums + k * W, V::zero());
        }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < piece.number; ++k)
        y_[(m + r) * w_.k + i * numbers_.codes() + k] =
            static_cast<float>(totals[r * kPieceCodes + k]);
  }

  // Adds the products of `R` rows of inputs with the `count` rows of a panel to `sums`,
  // which have a vector for each code.
  template <int R>
  EQQUANT_INNERMOST void add(const float* panel, int64_t codes, int64_t m, int64_t n,
                             int64_t count, float* sums) const {
    typename V::Floats x[R][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 4; ++v)
        x[r][v] = V::load(x_ + (m + r) * w_.n + n + v * W,
                          larger(0, smaller(W, count - v * W)));
    for (int64_t k = 0; k < codes; ++k, panel += kRows, sums += W) {
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        auto sum = V::load(sums + r * kPieceCodes * W);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum = V::fma(V::load(panel + v * W), x[r][v], sum);
        V::store(sums + r * kPieceCodes * W, sum);
      }
    }
  }

  const Blocks& w_;
  Numbers<V> numbers_;
  const float* x_;
  float* y_;
  int64_t rows_;
};

template <class V>
void float32_across(const Blocks& w, const float* x, float* y, int64_t rows,
                    const Parallel& parallel) {
  const Across<V> product(w, x, y, rows);
  parallel(product.pieces(), [&](int64_t i, int64_t) { product.piece(i); });
}

template <class V>
constexpr void add_float32_across(Kernels& found) {
  found.float32_across = float32_across<V>;
}

}  // namespace
}  // namespace eqquant
