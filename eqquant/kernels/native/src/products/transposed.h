// Products across the blocks, in float32: `y[m, k] = x[m, n] @ W[n, k]`.
//
// A vector decodes the same byte of consecutive rows of `W`, one per lane. The scales
// multiply `x` instead of the weight, once for several bytes of a block.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/decode.h"

namespace eqquant {
namespace {

// The numbers of bytes of a row of `W`, and of its rows, for which scaled inputs are
// reused.
constexpr int64_t kTransposedBytes = 32;
constexpr int64_t kTransposedColumns = 1024;

// The number of rows of inputs that pass over this part together.
constexpr int64_t kTransposedRows = 16;

template <class V, Packing packing>
class Transposed {
 public:
  static constexpr int64_t per = codes_per_byte(packing), W = V::width;
  static constexpr bool sign = packing == Packing::kBits8;
  static constexpr int R = V::registers / (per > 4 ? 16 : 8);

  Transposed(const Blocks& w, const float* x, float* y, int64_t rows)
      : w_(w), decode_(w), x_(x), y_(y), rows_(rows) {}

  // Computes the results for the bytes from `first` to `last`, all in the block `g`.
  void bytes(int64_t g, int64_t first, int64_t last) const {
    for (int64_t m = 0; m < rows_; m += kTransposedRows)
      some(m, smaller(kTransposedRows, rows_ - m), g, first, last);
  }

 private:
  // Computes the results for `number` rows of inputs from row `m`. The sums of some
  // rows of `W` are added up in float64, so that rounding errors do not build up.
  void some(int64_t m, int64_t number, int64_t g, int64_t first, int64_t last) const {
    const int64_t each = (last - first) * per;
    double sums[kTransposedRows * kTransposedBytes * per];
    for (int64_t i = 0; i < number * each; ++i) sums[i] = 0;
    for (int64_t n = 0; n < w_.n; n += kTransposedColumns) {
      int64_t count = smaller(kTransposedColumns, w_.n - n);
      int64_t r = 0;
      for (; r + R <= number; r += R)
        rows<R>(m + r, g, first, last, n, count, sums + r * each);
      for (; r < number; ++r)
        rows<1>(m + r, g, first, last, n, count, sums + r * each);
    }
    for (int64_t r = 0; r < number; ++r)
      for (int64_t i = 0; i < each && first * per + i < w_.k; ++i)
        y_[(m + r) * w_.k + first * per + i] = static_cast<float>(sums[r * each + i]);
  }

  template <int N>
  void rows(int64_t row, int64_t g, int64_t first, int64_t last, int64_t n,
            int64_t count, double* sums) const {
    float x[N * kTransposedColumns];
    for (int r = 0; r < N; ++r)
      scale(x_ + (row + r) * w_.n, g, n, count, x + r * kTransposedColumns);
    const uint8_t* zero =
        w_.zero_points == nullptr ? nullptr : w_.zero_points + g * w_.n + n;
    // (With several digits in a byte, more bytes at a time are slower.)
    constexpr int most = V::registers / (per == 1 ? 2 : 4) / (N * per);
    constexpr int B = most < 1 ? 1 : most < 8 ? most : 8;
    int64_t b = first;
    const int64_t each = (last - first) * per;
    for (; b + B <= last; b += B)
      together<N, B>(b, zero, n, count, x, sums + (b - first) * per, each);
    for (; b < last; ++b)
      together<N, 1>(b, zero, n, count, x, sums + (b - first) * per, each);
  }

  // Adds the products of `N` rows of scaled inputs with `B` bytes of each row of `W` to
  // `sums`, whose rows are `each` apart.
  template <int N, int B>
  void together(int64_t b, const uint8_t* zero, int64_t n, int64_t count,
                const float* x, double* sums, int64_t each) const {
    typename V::Floats sum[B * N * per];
    EQQUANT_UNROLL
    for (int i = 0; i < B * N * per; ++i) sum[i] = V::zero();
    const uint8_t* const c = w_.bytes + b * w_.n + n;
    // (Processors do not predict that the next bytes are `n` further.)
    const int64_t ahead = larger(2, B) * w_.n;
    int64_t i = 0;
    for (; i + W <= count; i += W) {
      EQQUANT_UNROLL
      for (int j = 0; j < B; ++j) {
        const uint8_t* const at = c + j * w_.n + i;
        prefetch<1>(at + ahead);
        add<N>(V::template bytes<sign>(at), zero, i, W, x + i, sum + j * N * per);
      }
    }
    if (i < count)
      for (int j = 0; j < B; ++j)
        add<N>(V::template bytes<sign>(c + j * w_.n + i, count - i), zero, i, count - i,
               x + i, sum + j * N * per);
    for (int j = 0; j < B; ++j)
      for (int r = 0; r < N; ++r)
        for (int64_t d = 0; d < per; ++d)
          sums[r * each + j * per + d] += V::sum(sum[(j * N + r) * per + d]);
  }

  template <int N>
  void add(typename V::Ints c, const uint8_t* zero, int64_t i, int64_t count,
           const float* x, typename V::Floats* sum) const {
    typename V::Floats point[per];
    decode_(c, point);
    if constexpr (packing == Packing::kBits4)
      if (zero != nullptr) {
        const auto less = V::to_floats(V::template bytes<false>(zero + i, count));
        for (int j = 0; j < per; ++j) point[j] = V::sub(point[j], less);
      }
    EQQUANT_UNROLL
    for (int r = 0; r < N; ++r) {
      const auto mine = V::load(x + r * kTransposedColumns);
      EQQUANT_UNROLL
      for (int j = 0; j < per; ++j)
        sum[r * per + j] = V::fma(mine, point[j], sum[r * per + j]);
    }
  }

  // Multiplies `x` by the scales, and pads it with zeros to whole vectors.
  void scale(const float* x, int64_t g, int64_t n, int64_t count, float* found) const {
    for (int64_t i = 0; i < count; i += W) {
      int64_t part = smaller(W, count - i);
      V::store(found + i,
               V::mul(V::load(x + n + i, part), V::scales(w_.scales, g, n + i, part)));
    }
  }

  const Blocks& w_;
  Decode<V, packing> decode_;
  const float* x_;
  float* y_;
  int64_t rows_;
};

template <class V, Packing packing>
void transposed_of(const Blocks& w, const float* x, float* y, int64_t rows,
                   const Parallel& parallel) {
  const Transposed<V, packing> product(w, x, y, rows);
  const int64_t size = smaller(kTransposedBytes, w.in_bytes.block);
  const int64_t each = divided_up(w.in_bytes.block, size);
  parallel(w.in_bytes.blocks * each, [&](int64_t i, int64_t) {
    int64_t g = i / each, first = g * w.in_bytes.block + i % each * size;
    int64_t last =
        smaller(smaller(first + size, (g + 1) * w.in_bytes.block), w.in_bytes.row);
    if (first < last) product.bytes(g, first, last);
  });
}

template <class V>
void transposed(const Blocks& w, const float* x, float* y, int64_t rows,
                const Parallel& parallel) {
  with_whole_bytes(w.packing, [&](auto packing) {
    transposed_of<V, decltype(packing)::value>(w, x, y, rows, parallel);
  });
}

template <class V>
constexpr void add_transposed(Kernels& found) {
  found.transposed = transposed<V>;
}

}  // namespace
}  // namespace eqquant
