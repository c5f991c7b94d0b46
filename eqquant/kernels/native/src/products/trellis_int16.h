// Products of weights in trellis codes, in 16-bit integers: points by inputs that are
// rounded in a unit of their row.
#pragma once

#include <cstdint>

#include "products/dot_words.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/round_inputs.h"
#include "products/some_rows.h"
#include "products/trellis.h"
#include "weight/trellis.h"

namespace eqquant {
namespace {

// The numbers of a row that are decoded before they are multiplied. The sum of as many
// products of a word and a point fits in 32 bits.
constexpr int64_t kTrellisWords = 4 * kWholeNumbers;
static_assert(kTrellisWords * 510 * kMostWord < 1ll << 31);

template <class V>
class TrellisWords {
 public:
  using Ints = typename V::Ints;
  static constexpr int64_t W = V::width, kRows = 4 * W;

  TrellisWords(const TrellisWeight& w, const Words& x, float* y)
      : w_(w), x_(x), y_(y) {}

  // Computes the results for up to `kRows` rows of the weight from row `n`. `sums` are
  // `LongSums` of these and each row of inputs.
  void columns(int64_t n, int64_t count, float* sums) const {
    LongSums<V> all(sums, x_.rows * kRows, w_.k, kTrellisSummed);
    alignas(64) int32_t pairs[kTrellisWords / 2 * kRows] = {};
    for (int64_t k = 0; k < w_.k; k += kTrellisWords) {
      const int64_t numbers = smaller(kTrellisWords, w_.k - k);
      decode(k, numbers, n, count, pairs);
      in_few_rows<V>(x_.rows, [&](auto number, int64_t m) EQQUANT_INLINE {
        add<decltype(number)::value>(pairs, numbers, x_.word + m * x_.stride + k,
                                     sums + m * kRows);
      });
      if (x_.outliers != nullptr) add_outliers(pairs, k, numbers, sums);
      all.reach(k + numbers);
    }
    all.finish();
    for (int64_t i = 0; i < count; i += W) {
      const int64_t some = smaller(W, count - i);
      const auto scale = V::scales(w_.scales, 0, n + i, some);
      for (int64_t m = 0; m < x_.rows; ++m) {
        const auto sum = V::mul(V::load(sums + m * kRows + i), V::all(x_.unit[m]));
        V::store(y_ + m * w_.n + n + i, V::mul(sum, scale), some);
      }
    }
  }

 private:
  void decode(int64_t k, int64_t numbers, int64_t n, int64_t count,
              int32_t* pairs) const {
    with_bits(w_.bits, [&](auto bits) {
      const TrellisPoints<V, decltype(bits)::value> points(w_);
      for (int64_t i = 0; i < numbers; i += kWholeNumbers)
        for (int64_t v = 0; v < count; v += W)
          decode(points, k + i, n + v, count - v, pairs + i / 2 * kRows + v);
    });
  }

  template <int bits>
  EQQUANT_INNERMOST void decode(const TrellisPoints<V, bits>& points, int64_t k,
                                int64_t n, int64_t count, int32_t* pairs) const {
    points.prefetch_after(k, n);
    Ints first;
    points.read(k, n, count, [&](auto number, Ints point) EQQUANT_INLINE {
      constexpr int i = decltype(number)::value;
      if constexpr (i % 2 == 0) first = point;
      else V::store(pairs + i / 2 * kRows, V::side_by_side(first, point));
    });
  }

  // Adds the products of `R` rows of inputs.
  template <int R>
  EQQUANT_INNERMOST void add(const int32_t* pairs, int64_t numbers, const int16_t* x,
                             float* sums) const {
    Ints sum[R][4];
    dot_words<V>(pairs, numbers, x, x_.stride, sum);
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_ADDED_UP(sum[r][v]);
        float* const to = sums + r * kRows + v * W;
        V::store(to, V::add(V::to_floats(sum[r][v]), V::load(to)));
      }
    }
  }

  // Adds the products of the outliers among `numbers` inputs from input `k`.
  void add_outliers(const int32_t* pairs, int64_t k, int64_t numbers,
                    float* sums) const {
    over_outliers(x_, k, k + numbers, [&](int64_t m, const Outlier& one) {
      const int64_t i = one.k - k;
      for (int64_t v = 0; v < kRows; v += W) {
        float* const to = sums + m * kRows + v;
        const auto point = one_of_pairs<V>(pairs + i / 2 * kRows + v, i % 2 != 0);
        V::store(to, V::fma(point, V::all(one.x), V::load(to)));
      }
    });
  }

  const TrellisWeight& w_;
  const Words& x_;
  float* y_;
};

template <class V>
void trellis_to_words(const TrellisWeight& w, const float* x, const Words& words,
                      int16_t* word, float* unit, int32_t* outliers, Outlier* outlier,
                      const Parallel& parallel) {
  to_words<V>(w.k, 0, x, 1, words, word, nullptr, unit, outliers, outlier, parallel);
}

template <class V>
int64_t trellis_int16_scratch(const TrellisWeight& w, int64_t rows, int64_t workers) {
  return workers * LongSums<V>::floats(rows * TrellisWords<V>::kRows, w.k);
}

template <class V>
void trellis_int16(const TrellisWeight& w, const Words& x, float* y, float* scratch,
                   const Parallel& parallel) {
  constexpr int64_t each = TrellisWords<V>::kRows;
  const TrellisWords<V> product(w, x, y);
  const int64_t mine = LongSums<V>::floats(x.rows * each, w.k);
  parallel(divided_up(w.n, each), [&](int64_t i, int64_t worker) {
    const int64_t n = i * each;
    product.columns(n, smaller(each, w.n - n), scratch + worker * mine);
  });
}

template <class V>
constexpr void add_trellis_int16(Kernels& found) {
  found.trellis_to_words = trellis_to_words<V>;
  found.trellis_int16_scratch = trellis_int16_scratch<V>;
  found.trellis_int16 = trellis_int16<V>;
}

}  // namespace
}  // namespace eqquant
