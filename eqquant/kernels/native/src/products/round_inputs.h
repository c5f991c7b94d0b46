// Rounds rows of inputs to two 8-bit digits, or to 16-bit integers (words). Outliers
// are handled separately.
#pragma once

#include <algorithm>
#include <cstdint>

#include "products/kernels.h"
#include "weight/words_of_quads.h"

namespace eqquant {
namespace {

// Every input of at least 64 times the geometric mean of the nonzero inputs of its row
// is an outlier. The range is in 128ths of an octave. Logarithms are read off the bits
// of floats, which makes them up to 11 of these too low: hence the 12.
constexpr int64_t kOutlierRange = 6 * 128 - 12;

constexpr int32_t kInfinity = 0x7f800000, kSmallest = 0x00800000;

inline float as_float(int32_t bits) {
  float found;
  __builtin_memcpy(&found, &bits, 4);
  return found;
}

// The largest absolute value of a row, and the smallest outlier, as bits.
struct Range {
  int32_t largest, limit;

  template <class V>
  static Range of(const float* x, int64_t k) {
    auto largest = V::ints(0);
    const auto smallest = V::ints(kSmallest), infinity = V::ints(kInfinity);
    int64_t total = 0, number = 0;
    for (int64_t i = 0; i < k;) {
      // The sum of this many terms fits in 32 bits.
      auto sum = V::ints(0);
      for (const int64_t end = smaller(i + (1 << 15), k); i < end; i += V::width) {
        const auto a = V::absolute(V::load(x + i, smaller(V::width, k - i)));
        largest = V::max(largest, a);
        const auto mask =
            V::without(V::at_least(a, smallest), V::at_least(a, infinity));
        sum = V::add(sum, V::only(V::template right<16>(a), mask));
        number += __builtin_popcount(V::bits(mask));
      }
      total += V::sum(sum);
    }
    int64_t limit = kInfinity;
    if (number != 0) limit = smaller(limit, (total / number + kOutlierRange) << 16);
    return {V::largest(largest), static_cast<int32_t>(limit)};
  }
};

// Counts the outliers of a row, and reduces `range.largest` to the others.
template <class V>
int64_t count_outliers(const float* x, int64_t k, Range& range) {
  auto largest = V::ints(0);
  const auto limit = V::ints(range.limit);
  int64_t number = 0;
  for (int64_t i = 0; i < k; i += V::width) {
    const int64_t here = smaller(V::width, k - i);
    const auto a = V::absolute(V::load(x + i, here));
    const auto mask = V::at_least(a, limit);
    largest = V::max(largest, V::only(a, V::without(V::first(here), mask)));
    number += __builtin_popcount(V::bits(mask));
  }
  range.largest = V::largest(largest);
  return number;
}

// The rounding of a row to integers up to `most`, in a unit of its own.
struct Rounding {
  int32_t limit;
  float unit;
  int64_t outliers;  // the number of outliers, or `kNoDigits`

  // `least`: the smallest factor by which the unit is multiplied. `many`: the largest
  // number of outliers of a row.
  template <class V>
  static Rounding of(const float* x, int64_t k, float most, float least, int64_t many) {
    Range range = Range::of<V>(x, k);
    const bool any = range.largest >= range.limit;
    const int64_t number = any ? count_outliers<V>(x, k, range) : 0;
    const float unit = as_float(range.largest) / most;
    // Too small: the unit would be subnormal, which some threads flush to zero.
    const bool tiny = range.largest >= kSmallest && unit * least < as_float(kSmallest);
    const bool none = number > many || tiny;
    return {range.limit, none || range.largest < kSmallest ? 1 : unit,
            none ? kNoDigits : number};
  }

  // Calls `put(i, count, v)` for the `count` inputs from position `i` on that have
  // digits, a vector at a time: `v` is in units, and zero for outliers, which are
  // written separately.
  template <class V, class Put>
  void over(const float* x, int64_t k, Outlier* outlier, Put put) const {
    const auto s = V::all(unit);
    for (int64_t i = 0; i < k; i += V::width) {
      const int64_t count = smaller(V::width, k - i);
      const auto some = V::load(x + i, count);
      const auto large = V::at_least(V::absolute(some), V::ints(limit));
      put(i, count, V::only(V::div(some, s), V::without(V::first(count), large)));
      for (uint32_t left = V::bits(large); left != 0; left &= left - 1) {
        const int64_t at = i + __builtin_ctz(left);
        *outlier++ = {static_cast<int32_t>(at), x[at] / unit};
      }
    }
  }
};

template <class V>
void to_digits(const float* x, int64_t k, const Digits& digits, int8_t* digit,
                      float* unit, int32_t* outliers, Outlier* outlier,
                      const Parallel& parallel) {
  const int64_t rows = digits.rows, stride = digits.stride;
  parallel(rows, [&](int64_t m, int64_t) {
    int8_t* const first = digit + m * stride;
    int8_t* const second = first + rows * stride;
    const Rounding row = Rounding::of<V>(x + m * k, k, 127, 1, digits.most);
    outliers[m] = static_cast<int32_t>(row.outliers);
    unit[m] = row.unit;
    const int64_t written = row.outliers == kNoDigits ? 0 : k;
    row.over<V>(x + m * k, written, outlier + m * digits.most,
                [&](int64_t i, int64_t count, typename V::Floats v) {
                  const auto r = V::nearest(v);
                  const auto rest = V::mul(V::sub(v, r), V::all(254));
                  V::store_bytes(first + i, V::to_ints(r), count);
                  V::store_bytes(second + i, V::to_ints(rest), count);
                });
    for (int64_t i = written; i < stride; ++i) first[i] = second[i] = 0;
  });
}

// Calls `add(m, outlier)` for the outliers of each row `m` at positions from `first` to
// `last`.
template <class Add>
void over_outliers(const Words& x, int64_t first, int64_t last, Add add) {
  for (int64_t m = 0; m < x.rows; ++m) {
    const Outlier* const all = x.outlier + m * x.most;
    const Outlier* const end = all + larger(0, x.outliers[m]);
    const Outlier* at = std::lower_bound(
        all, end, first, [](const Outlier& o, int64_t k) { return o.k < k; });
    for (; at < end && at->k < last; ++at) add(m, *at);
  }
}

// Rounds rows of `k` inputs. `least`: the smallest factor by which units are multiplied.
// `apart`: see `apart_in_words`.
template <class V>
void to_words(int64_t k, int64_t apart, const float* x, float least, const Words& words,
              int16_t* word, float* sums, float* unit, int32_t* outliers,
              Outlier* outlier, const Parallel& parallel) {
  parallel(words.rows, [&](int64_t m, int64_t) {
    int16_t* const mine = word + m * words.stride;
    const int64_t groups = divided_up(words.stride, 16);
    float* const sum = sums == nullptr ? nullptr : sums + m * groups;
    const Rounding row = Rounding::of<V>(x + m * k, k, kMostWord, least, words.most);
    outliers[m] = static_cast<int32_t>(row.outliers);
    unit[m] = row.unit;
    const int64_t written = row.outliers == kNoDigits ? 0 : k;
    row.over<V>(x + m * k, written, outlier + m * words.most,
                [&](int64_t i, int64_t count, typename V::Floats v) {
                  V::store_words(mine + i, V::to_ints(v), count);
                });
    for (int64_t i = written; i < words.stride; ++i) mine[i] = 0;
    for (int64_t g = 0; sum != nullptr && g < groups; ++g) {
      int32_t of_group = 0;
      for (int64_t i = 16 * g; i < 16 * (g + 1); ++i) of_group += mine[i];
      sum[g] = static_cast<float>(of_group);
    }
    if (apart != 0) order_as_words(apart, mine, words.stride);
  });
}

template <class V>
void to_words(const Blocks& w, const float* x, float least, const Words& words,
              int16_t* word, float* sums, float* unit, int32_t* outliers,
              Outlier* outlier, const Parallel& parallel) {
  to_words<V>(w.k, apart_in_words(w), x, least, words, word, sums, unit, outliers,
              outlier, parallel);
}

}  // namespace
}  // namespace eqquant
