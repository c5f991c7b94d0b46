// Recomputes non-finite results in float32 from the decoded weight, each number of
// which is scaled before the product, and without the digits that are not codes. So
// infinities and NaNs are those of the reference product.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/decode.h"

namespace eqquant {
namespace {

// The length of partial sums, which are added up in float64: short enough that rounding
// errors do not build up.
constexpr int64_t kMendBytes = 64;
constexpr int64_t kMendColumns = 1024;

// The number of results that a task checks (at least one row).
constexpr int64_t kMendResults = 1 << 14;

template <class V>
bool finite(typename V::Floats x) {
  return V::nans(V::sub(x, x)) == 0;
}

template <class V, Codes kind>
class Mend {
 public:
  static constexpr int64_t per = codes_per_byte(kind), W = V::width;

  explicit Mend(const Weight& w) : w_(w), decode_(w) {}

  void row(const AnyRows& x, int64_t m, float* y) const {
    bool known = false, nan = false;
    for (int64_t n = 0; n < w_.n; n += W) {
      const int64_t count = smaller(W, w_.n - n);
      if (finite<V>(V::load(y + n, count))) continue;
      if (!known) nan = has_nan(x, m);
      known = true;
      float found[W];
      V::store(found, nan ? V::all(__builtin_nanf("")) : columns(x, m, n, count),
               count);
      for (int64_t i = 0; i < count; ++i)
        if (!__builtin_isfinite(y[n + i])) y[n + i] = found[i];
    }
  }

  void transposed_row(const float* x, float* y, int64_t k) const {
    for (int64_t i = 0; i < k; i += W) {
      const int64_t count = smaller(W, k - i);
      if (finite<V>(V::load(y + i, count))) continue;
      for (int64_t j = i; j < i + count; ++j)
        if (is_code(j) && !__builtin_isfinite(y[j])) y[j] = code(x, j);
    }
  }

 private:
  bool is_code(int64_t k) const {
    return k % per < w_.used && k / per * w_.used + k % per < w_.k;
  }

  static float input(const AnyRows& x, int64_t m, int64_t k) {
    const int64_t at = m * x.stride + k;
    return x.x != nullptr ? x.x[at] : x.unit[m] * static_cast<float>(x.digit[at]);
  }

  // Whether a row of inputs has a NaN, which makes all of its results NaN.
  bool has_nan(const AnyRows& x, int64_t m) const {
    for (int64_t k = 0; k < w_.bytes * per; ++k)
      if (__builtin_isnan(input(x, m, k))) return true;
    return false;
  }

  // Decodes byte `b` of `count` rows of the weight, from row `n`.
  void numbers(int64_t b, int64_t n, int64_t count, typename V::Floats* found) const {
    const int64_t g = b / w_.block;
    decode_(V::template bytes < kind == Codes::kInt8 > (w_.codes + b * w_.n + n, count),
            found);
    const auto scale = V::scales(w_, g, n, count);
    for (int64_t j = 0; j < per; ++j) {
      if (w_.zero != nullptr)
        found[j] = V::sub(found[j], V::to_floats(V::template bytes<false>(
                                        w_.zero + g * w_.n + n, count)));
      found[j] = V::mul(found[j], scale);
    }
  }

  typename V::Floats columns(const AnyRows& x, int64_t m, int64_t n,
                             int64_t count) const {
    const uint32_t all = (1u << count) - 1;
    auto sum = V::wide(V::zero());
    for (int64_t b = 0; b < w_.bytes && (V::nans(V::narrow(sum)) & all) != all;) {
      auto part = V::zero();
      for (const int64_t end = smaller(b + kMendBytes, w_.bytes); b < end; ++b) {
        typename V::Floats weight[per];
        numbers(b, n, count, weight);
        for (int64_t j = 0; j < per && is_code(b * per + j); ++j)
          part = V::fma(weight[j], V::all(input(x, m, b * per + j)), part);
      }
      sum = V::add(sum, part);
    }
    return V::narrow(sum);
  }

  // The result of code `k` of each row of the weight.
  float code(const float* x, int64_t k) const {
    double sum = 0;
    for (int64_t n = 0; n < w_.n && !__builtin_isnan(sum);) {
      auto part = V::zero();
      for (const int64_t end = smaller(n + kMendColumns, w_.n); n < end; n += W) {
        const int64_t count = smaller(W, end - n);
        typename V::Floats weight[per];
        numbers(k / per, n, count, weight);
        part = V::fma(V::only(weight[k % per], count), V::load(x + n, count), part);
      }
      sum += V::sum(part);
    }
    return static_cast<float>(sum);
  }

  const Weight& w_;
  Decode<V, kind> decode_;
};

// Calls `row(m)` in parallel for all rows of a `y` with `columns` columns.
template <class Row>
void over_rows(int64_t rows, int64_t columns, const Parallel& parallel, Row row) {
  const int64_t each = larger(1, kMendResults / columns);
  parallel(divided_up(rows, each), [&](int64_t i, int64_t) {
    for (int64_t m = i * each; m < smaller((i + 1) * each, rows); ++m) row(m);
  });
}

template <class V>
void mend(const Weight& w, const AnyRows& x, float* y, int64_t rows,
          const Parallel& parallel) {
  with_kind(w.kind, [&](auto kind) {
    const Mend<V, decltype(kind)::value> mend(w);
    over_rows(rows, w.n, parallel, [&](int64_t m) { mend.row(x, m, y + m * w.n); });
  });
}

template <class V>
void mend_transposed(const Weight& w, const float* x, float* y, int64_t rows, int64_t k,
                     const Parallel& parallel) {
  with_kind(w.kind, [&](auto kind) {
    const Mend<V, decltype(kind)::value> mend(w);
    over_rows(rows, k, parallel,
              [&](int64_t m) { mend.transposed_row(x + m * w.n, y + m * k, k); });
  });
}

template <class V>
constexpr void add_non_finite(Kernels& found) {
  found.mend = mend<V>;
  found.mend_transposed = mend_transposed<V>;
}

}  // namespace
}  // namespace eqquant
