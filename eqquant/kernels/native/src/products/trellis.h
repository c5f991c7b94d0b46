// Products of weights in trellis codes, in float32.
//
// Points are decoded once for some rows of inputs: integers, which a single row
// multiplies as they are, or numbers, which are stored for several.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/some_rows.h"
#include "weight/trellis.h"

namespace eqquant {
namespace {

// The number of codes of a row after which sums are added up in float64. These are sums
// of a few, and of these sums, so that rounding errors do not build up.
constexpr int64_t kTrellisSummed = 2048;

// The number of vectors of rows of the weight whose words are read in turn by a product
// of one row, since long runs of consecutive memory are read fastest.
constexpr int64_t kTrellisVectors = 16;

// The numbers of a row that are decoded before they are multiplied by several rows of
// inputs: those of four vectors of rows fit in the first cache.
constexpr int64_t kTrellisDecoded = 2 * kWholeNumbers;

// The product of a row of inputs, padded with zeros to whole words.
template <class V, int bits>
class TrellisRow {
 public:
  using Floats = typename V::Floats;
  static constexpr int64_t W = V::width, kRows = kTrellisVectors * W;

  TrellisRow(const TrellisWeight& w, const float* x, float* y)
      : w_(w), points_(w), x_(x), y_(y) {}

  // Computes the results for `count` rows of the weight from row `n`. `sums` are
  // `LongSums` of these.
  void columns(int64_t n, int64_t count, float* sums) const {
    LongSums<V> all(sums, kRows, w_.k, kTrellisSummed);
    for (int64_t k = 0; k < w_.k; k += kWholeNumbers) {
      for (int64_t i = 0; i < count; i += W) add(k, n + i, count - i, sums + i);
      all.reach(k + kWholeNumbers);
    }
    all.finish();
    for (int64_t i = 0; i < count; i += W) {
      const int64_t some = smaller(W, count - i);
      const auto scale = V::scales(w_.scales, 0, n + i, some);
      V::store(y_ + n + i, V::mul(V::load(sums + i), scale), some);
    }
  }

 private:
  EQQUANT_INNERMOST void add(int64_t k, int64_t n, int64_t count, float* sums) const {
    const float* const x = x_ + k;
    points_.prefetch_after(k, n);
    // (Two, so that additions wait less for each other.)
    Floats sum[2] = {V::zero(), V::zero()};
    points_.read(k, n, count, [&](auto number, typename V::Ints point) EQQUANT_INLINE {
      constexpr int i = decltype(number)::value;
      sum[i % 2] = V::fma(V::to_floats(point), V::all(x[i]), sum[i % 2]);
    });
    V::store(sums, V::add(V::load(sums), V::add(sum[0], sum[1])));
  }

  const TrellisWeight& w_;
  TrellisPoints<V, bits> points_;
  const float* x_;
  float* y_;
};

// Decodes numbers of four vectors of rows.
template <class V>
class TrellisNumbers {
 public:
  using Floats = typename V::Floats;
  static constexpr int64_t W = V::width, kRows = 4 * W;

  explicit TrellisNumbers(const TrellisWeight& w) : w_(w) {}

  // Decodes `numbers` numbers of `count` rows, from number `k` of row `n`, to
  // `[numbers, kRows]` floats, with zeros for missing rows.
  void decode(int64_t k, int64_t numbers, int64_t n, int64_t count, float* to) const {
    with_bits(w_.bits, [&](auto bits) {
      const TrellisPoints<V, decltype(bits)::value> points(w_);
      for (int64_t i = 0; i < numbers; i += kWholeNumbers)
        for (int64_t v = 0; v < kRows; v += W)
          v < count ? decode(points, k + i, n + v, count - v, to + i * kRows + v)
                    : clear(to + i * kRows + v);
    });
  }

 private:
  template <int bits>
  EQQUANT_INNERMOST void decode(const TrellisPoints<V, bits>& points, int64_t k,
                                int64_t n, int64_t count, float* to) const {
    const Floats scale = V::scales(w_.scales, 0, n, smaller(W, count));
    points.prefetch_after(k, n);
    points.read(k, n, count, [&](auto i, typename V::Ints point) EQQUANT_INLINE {
      V::store(to + decltype(i)::value * kRows, V::mul(V::to_floats(point), scale));
    });
  }

  static void clear(float* to) {
    for (int64_t i = 0; i < kWholeNumbers; ++i) V::store(to + i * kRows, V::zero());
  }

  const TrellisWeight& w_;
};

// The product of several rows of inputs, from the decoded numbers.
template <class V>
class TrellisRows {
 public:
  using Floats = typename V::Floats;
  static constexpr int64_t W = V::width, kRows = TrellisNumbers<V>::kRows;

  TrellisRows(const TrellisWeight& w, const float* x, float* y, int64_t rows)
      : w_(w), numbers_(w), x_(x), y_(y), rows_(rows) {}

  // Computes the results for up to `kRows` rows of the weight from row `n`. `sums` are
  // `LongSums` of these and each row of inputs.
  void columns(int64_t n, int64_t count, float* sums) const {
    LongSums<V> all(sums, rows_ * kRows, w_.k, kTrellisSummed);
    alignas(64) float decoded[kTrellisDecoded * kRows];
    for (int64_t k = 0; k < w_.k; k += kTrellisDecoded) {
      const int64_t numbers = smaller(kTrellisDecoded, w_.k - k);
      numbers_.decode(k, numbers, n, count, decoded);
      in_few_rows<V>(rows_, [&](auto number, int64_t m) EQQUANT_INLINE {
        add<decltype(number)::value>(decoded, numbers, x_ + m * w_.k + k,
                                     sums + m * kRows);
      });
      all.reach(k + numbers);
    }
    all.finish();
    for (int64_t m = 0; m < rows_; ++m)
      for (int64_t i = 0; i < count; i += W)
        V::store(y_ + m * w_.n + n + i, V::load(sums + m * kRows + i),
                 smaller(W, count - i));
  }

 private:
  // Adds the products of `R` rows of inputs.
  template <int R>
  EQQUANT_INNERMOST void add(const float* decoded, int64_t numbers, const float* x,
                             float* sums) const {
    Floats sum[R][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) sum[r][v] = V::zero();
    }
    const int64_t stride = w_.k;
    for (int64_t i = 0; i < numbers; ++i, decoded += kRows) {
      Floats w[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) w[v] = V::load(decoded + v * W);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats all = V::all(x[r * stride + i]);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = V::fma(w[v], all, sum[r][v]);
      }
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        EQQUANT_ADDED_UP(sum[r][v]);
        float* const to = sums + r * kRows + v * W;
        V::store(to, V::add(sum[r][v], V::load(to)));
      }
    }
  }

  const TrellisWeight& w_;
  TrellisNumbers<V> numbers_;
  const float* x_;
  float* y_;
  int64_t rows_;
};

// For products across the rows of the weight: the number of rows of inputs for which
// numbers are decoded once, the number of rows of the weight that are decoded before
// they are multiplied, and after how many of them, in each lane, sums are added up in
// float64.
constexpr int64_t kAcrossInputs = 32, kAcrossDecoded = 256, kAcrossSummed = 128;

// The product across the rows of the weight.
template <class V>
class TrellisAcross {
 public:
  using Floats = typename V::Floats;
  static constexpr int64_t W = V::width, kRows = TrellisNumbers<V>::kRows;
  static constexpr int kFew = V::registers / 8;

  TrellisAcross(const TrellisWeight& w, const float* x, float* y, int64_t rows)
      : w_(w), numbers_(w), x_(x), y_(y), rows_(rows) {}

  // Computes the results for up to 32 numbers from number `k`.
  void numbers(int64_t k) const {
    for (int64_t m = 0; m < rows_; m += kAcrossInputs)
      some(k, m, smaller(kAcrossInputs, rows_ - m));
  }

 private:
  void some(int64_t k, int64_t m, int64_t rows) const {
    constexpr int64_t summed = kAcrossSummed * W;
    // (A vector for each number.)
    alignas(64) float sums[kAcrossInputs * kWholeNumbers * W];
    alignas(64) float decoded[kWholeNumbers * kAcrossDecoded];
    double totals[kAcrossInputs * kWholeNumbers] = {};
    for (int64_t n = 0; n < w_.n; n += summed) {
      const int64_t last = smaller(n + summed, w_.n);
      for (int64_t i = 0; i < rows * kWholeNumbers; ++i) V::store(sums + i * W, V::zero());
      for (int64_t some = n; some < last; some += kAcrossDecoded) {
        const int64_t count = smaller(kAcrossDecoded, last - some);
        for (int64_t p = 0; p < count; p += kRows)
          numbers_.decode(k, kWholeNumbers, some + p, smaller(kRows, count - p),
                          decoded + p * kWholeNumbers);
        int64_t r = 0;
        for (; r + kFew <= rows; r += kFew)
          add<kFew>(decoded, m + r, some, count, sums + r * kWholeNumbers * W);
        for (; r < rows; ++r)
          add<1>(decoded, m + r, some, count, sums + r * kWholeNumbers * W);
      }
      for (int64_t i = 0; i < rows * kWholeNumbers; ++i)
        totals[i] += V::sum(V::load(sums + i * W));
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < smaller(kWholeNumbers, w_.k - k); ++i)
        y_[(m + r) * w_.k + k + i] = static_cast<float>(totals[r * kWholeNumbers + i]);
  }

  // Adds the products of `R` rows of inputs from row `m` with `count` decoded rows of
  // the weight from row `n`.
  template <int R>
  EQQUANT_INNERMOST void add(const float* decoded, int64_t m, int64_t n, int64_t count,
                             float* sums) const {
    constexpr int I = 4;
    alignas(64) float x[R * kAcrossDecoded];
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < count; v += W)
        V::store(x + r * kAcrossDecoded + v,
                 V::load(x_ + (m + r) * w_.n + n + v, smaller(W, count - v)));
    for (int64_t i = 0; i < kWholeNumbers; i += I) {
      Floats sum[R][I];
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_UNROLL
        for (int j = 0; j < I; ++j)
          sum[r][j] = V::load(sums + (r * kWholeNumbers + i + j) * W);
      }
      for (int64_t v = 0; v < count; v += W) {
        const float* const w =
            decoded + v / kRows * kRows * kWholeNumbers + i * kRows + v % kRows;
        Floats each[I];
        EQQUANT_UNROLL
        for (int j = 0; j < I; ++j) each[j] = V::load(w + j * kRows);
        EQQUANT_UNROLL
        for (int r = 0; r < R; ++r) {
          const Floats mine = V::load(x + r * kAcrossDecoded + v);
          EQQUANT_UNROLL
          for (int j = 0; j < I; ++j) sum[r][j] = V::fma(mine, each[j], sum[r][j]);
        }
      }
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_UNROLL
        for (int j = 0; j < I; ++j) {
          EQQUANT_ADDED_UP(sum[r][j]);
          V::store(sums + (r * kWholeNumbers + i + j) * W, sum[r][j]);
        }
      }
    }
  }

  const TrellisWeight& w_;
  TrellisNumbers<V> numbers_;
  const float* x_;
  float* y_;
  int64_t rows_;
};

template <class V>
int64_t trellis_row_scratch(const TrellisWeight& w, int64_t workers) {
  return workers * LongSums<V>::floats(kTrellisVectors * V::width, w.k);
}

template <class V>
void trellis_row(const TrellisWeight& w, const float* x, float* y, float* scratch,
                 const Parallel& parallel) {
  constexpr int64_t W = V::width, most = kTrellisVectors * W;
  const int64_t mine = LongSums<V>::floats(most, w.k), workers = parallel.workers;
  // (Each thread gets as many tasks as any other.)
  const int64_t tasks = divided_up(w.n, workers * most) * workers;
  const int64_t together = divided_up(w.n, tasks * W) * W;
  with_bits(w.bits, [&](auto bits) {
    const TrellisRow<V, decltype(bits)::value> product(w, x, y);
    parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
      const int64_t n = i * together;
      product.columns(n, smaller(together, w.n - n), scratch + worker * mine);
    });
  });
}

template <class V>
int64_t trellis_scratch(const TrellisWeight& w, int64_t rows, int64_t workers) {
  int64_t most = 0;
  in_some_rows(rows, [&](int64_t, int64_t some) {
    most = larger(most, LongSums<V>::floats(some * TrellisRows<V>::kRows, w.k));
  });
  return workers * most;
}

template <class V>
void trellis(const TrellisWeight& w, const float* x, float* y, int64_t rows,
             float* scratch, const Parallel& parallel) {
  constexpr int64_t each = TrellisRows<V>::kRows;
  in_some_rows(rows, [&](int64_t m, int64_t some) {
    const TrellisRows<V> product(w, x + m * w.k, y + m * w.n, some);
    const int64_t mine = LongSums<V>::floats(some * each, w.k);
    parallel(divided_up(w.n, each), [&](int64_t i, int64_t worker) {
      const int64_t n = i * each;
      product.columns(n, smaller(each, w.n - n), scratch + worker * mine);
    });
  });
}

template <class V>
void trellis_across(const TrellisWeight& w, const float* x, float* y, int64_t rows,
                    const Parallel& parallel) {
  const TrellisAcross<V> product(w, x, y, rows);
  parallel(divided_up(w.k, kWholeNumbers),
           [&](int64_t i, int64_t) { product.numbers(i * kWholeNumbers); });
}

template <class V>
constexpr void add_trellis(Kernels& found) {
  found.trellis_row_scratch = trellis_row_scratch<V>;
  found.trellis_row = trellis_row<V>;
  found.trellis_scratch = trellis_scratch<V>;
  found.trellis = trellis<V>;
  found.trellis_across = trellis_across<V>;
}

}  // namespace
}  // namespace eqquant
