// Searches for scales like `formats/gguf/_search.py`, number by number, for a vector of
// rows at a time. Subnormal numbers count as zeros.
#pragma once

#include <cstdint>

#include "arrays/encode.h"
#include "isa/basics.h"

namespace eqquant {
namespace {

// The number of rows of a tile that is encoded at a time.
constexpr int kRows = 64;

using V = EQQUANT_SET;
using Floats = V::Floats;
using Ints = V::Ints;
using Mask = V::Mask;
constexpr int kLanes = V::width;

inline Floats all(float x) { return V::all(x); }
inline Floats product(Floats x, Floats y) { return V::mul(x, y); }
inline Floats sum(Floats x, Floats y) { return V::add(x, y); }
inline Floats minus(Floats x, Floats y) { return V::sub(x, y); }
inline Floats fewest(Floats x, Floats y) { return V::min(x, y); }
inline Floats most(Floats x, Floats y) { return V::max(x, y); }
inline Floats magnitude(Floats x) { return V::magnitude(x); }
inline Floats negative(Floats x) { return V::negative(x); }

inline Mask above(Floats x, Floats y) { return V::above(x, y); }
// Returns `x` where a comparison is true, and `y` elsewhere.
inline Floats where(Mask is, Floats x, Floats y) { return V::where(is, x, y); }

inline Floats rounded(Floats x) { return V::nearest(x); }

inline Floats clipped(Floats x, float low, float high) {
  return fewest(most(x, all(low)), all(high));
}

inline Floats reciprocal(Floats x) {
  return V::zero_where(V::equal(x, V::zero()), V::div(all(1.0f), x));
}

// Rounds to this many bits.
template <int bits>
Floats of_bits(Floats x) {
  constexpr int cut = 24 - bits;
  const Ints i = V::as_ints(x), odd = V::both(V::right<cut>(i), 1);
  const Ints up = V::add(i, V::add(odd, V::ints((1 << (cut - 1)) - 1)));
  return V::as_floats(V::both(up, -(1 << cut)));
}

// Returns the sum of `number` terms: the first half of them plus the second, and so on.
template <int number, int step = 1, int at = 0, class Term>
EQQUANT_INLINE inline auto total(const Term& term) {
  if constexpr (step == number)
    return term(at);
  else
    return total<number, 2 * step, at>(term) + total<number, 2 * step, at + step>(term);
}

struct Sum {
  Floats x;
};

struct Sums {
  Floats l, l2, xl;
};

inline Sum operator+(Sum a, Sum b) { return {sum(a.x, b.x)}; }

inline Sums operator+(Sums a, Sums b) {
  return {sum(a.l, b.l), sum(a.l2, b.l2), sum(a.xl, b.xl)};
}

template <int number, class Term>
EQQUANT_INLINE inline Floats total_of(const Term& term) {
  return total<number>([&](int i) EQQUANT_INLINE { return Sum{term(i)}; }).x;
}

// Sixteen points, and the edges between them.
class Points {
 public:
  explicit Points(const float* points) : points_(points) {
    float edges[15];
    for (int i = 0; i < 15; ++i) edges[i] = (points[i + 1] + points[i]) / 2;
    const auto at = [&](int i) { return all(edges[i]); };
    first_ = at(7), second_[0] = at(3), second_[1] = at(11);
    for (int i = 0; i < 8; ++i) thirds_[i] = edges[4 * (i % 4) + 1];
    for (int i = 0; i < 8; ++i) fourths_[i] = edges[2 * i];
  }

  // Returns the indices of the nearest points, by bisection. Ties go to the higher one.
  Ints codes(Floats x) const {
    const auto bit = [&](Floats edge, int value) {
      return V::only(V::ints(value), V::not_below(x, edge));
    };
    const V::Table8 thirds(thirds_), fourths(fourths_);
    const Mask high = V::not_below(x, first_);
    Ints code = V::only(V::ints(8), high);
    code = V::either(code, bit(where(high, second_[1], second_[0]), 4));
    code = V::either(code, bit(thirds[V::right<2>(code)], 2));
    return V::either(code, bit(fourths[V::right<1>(code)], 1));
  }

  Floats nearest(Floats x) const { return points_[codes(x)]; }

 private:
  V::Table16 points_;
  Floats first_, second_[2];
  float thirds_[8];
  float fourths_[8];
};

// Returns the first number with the largest absolute value.
inline Floats signed_largest(const float* x, int64_t number, int64_t stride) {
  Floats found = V::load(x);
  for (int64_t i = 1; i < number; ++i) {
    const Floats other = V::load(x + i * stride);
    found = where(above(magnitude(other), magnitude(found)), other, found);
  }
  return found;
}

// `best_multiple` of the numbers `x`, which are `kRows` apart.
template <int part, class Nearest>
Floats best_multiple(const float* x, const Encoding& e, const Nearest& nearest) {
  const Floats largest = signed_largest(x, part, kRows), unit = reciprocal(largest);
  Floats scaled[part], weights[part], weighted[part];
  for (int i = 0; i < part; ++i) {
    scaled[i] = product(V::load(x + i * kRows), unit);
    weights[i] = of_bits<10>(product(scaled[i], scaled[i]));
    weighted[i] = of_bits<16>(product(weights[i], scaled[i]));
  }
  Floats best_gain = V::zero(), best = V::zero();
  for (int64_t c = 0; c < e.candidates; ++c) {
    const Floats factor = all(e.factors[c]);
    const Sums s = total<part>([&](int i) EQQUANT_INLINE {
      const Floats point = nearest(product(factor, scaled[i]));
      return Sums{V::zero(), product(weights[i], product(point, point)),
                  product(weighted[i], point)};
    });
    const Floats inverse = reciprocal(s.l2);
    const Floats gain = product(product(s.xl, s.xl), inverse);
    const Mask better = above(gain, best_gain);
    best_gain = where(better, gain, best_gain);
    best = where(better, product(s.xl, inverse), best);
  }
  return product(best, largest);
}

struct Range {
  Floats scale, below;
};

// `best_range` of the numbers `x`, which are `kRows` apart.
template <int part, bool absolute>
Range best_range(const float* x, const Encoding& e) {
  const Floats zero = V::zero();
  const auto number = [&](int i) EQQUANT_INLINE {
    return V::load(x + i * kRows);
  };
  Floats low = zero, high = zero;
  for (int i = 0; i < part; ++i) {
    low = fewest(low, number(i));
    high = most(high, number(i));
  }
  const Floats largest = magnitude(most(high, negative(low)));
  const Floats unit = reciprocal(largest);
  Floats mean = zero;
  if (!absolute) {
    const Floats square = total_of<part>(
        [&](int i) EQQUANT_INLINE { return product(number(i), number(i)); });
    mean = V::sqrt(product(square, all(1.0f / part)));
  }
  Floats scaled[part], weights[part], weighted[part], over[part], codes[part];
  low = zero, high = product(number(0), unit);
  for (int i = 0; i < part; ++i) {
    const Floats size = magnitude(number(i));
    scaled[i] = product(number(i), unit);
    weights[i] = of_bits<14>(product(absolute ? size : sum(mean, size), unit));
    weighted[i] = of_bits<19>(product(weights[i], scaled[i]));
    low = fewest(low, scaled[i]);
    high = most(high, scaled[i]);
  }
  for (int i = 0; i < part; ++i) over[i] = minus(scaled[i], low);
  const Floats sum_w =
      total_of<part>([&](int i) EQQUANT_INLINE { return weights[i]; });
  const Floats sum_x =
      total_of<part>([&](int i) EQQUANT_INLINE { return weighted[i]; });

  const float last = static_cast<float>(e.codes - 1);
  const auto code = [&](Floats factor, int i) EQQUANT_INLINE {
    return clipped(rounded(product(factor, over[i])), 0, last);
  };
  const auto error = [&](Floats scale, Floats low) EQQUANT_INLINE {
    return total_of<part>([&](int i) EQQUANT_INLINE {
      const Floats difference =
          minus(V::fma(scale, codes[i], low), scaled[i]);
      return product(weights[i], absolute ? magnitude(difference)
                                          : product(difference, difference));
    });
  };
  const Floats range = minus(high, low), inverse_range = reciprocal(range);
  Floats best_scale = of_bits<19>(product(range, all(1.0f / last)));
  Floats best_low = low;
  const Floats first = reciprocal(best_scale);
  for (int i = 0; i < part; ++i) codes[i] = code(first, i);
  Floats least = error(best_scale, best_low);
  for (int64_t c = 0; c < e.candidates; ++c) {
    const Floats factor = product(all(e.factors[c]), inverse_range);
    const Sums s = total<part>([&](int i) EQQUANT_INLINE {
      codes[i] = code(factor, i);
      return Sums{product(weights[i], codes[i]),
                  product(weights[i], product(codes[i], codes[i])),
                  product(weighted[i], codes[i])};
    });
    const Floats determinant = minus(product(sum_w, s.l2), product(s.l, s.l));
    const Floats inverse = reciprocal(determinant);
    Floats scale =
        product(minus(product(sum_w, s.xl), product(sum_x, s.l)), inverse);
    Floats bottom =
        product(minus(product(s.l2, sum_x), product(s.l, s.xl)), inverse);
    const Mask positive = above(bottom, zero);
    scale = of_bits<19>(where(positive, product(s.xl, reciprocal(s.l2)), scale));
    bottom = V::zero_where(positive, bottom);
    const Floats found = error(scale, bottom);
    Mask better = above(least, found);
    better = V::common(better, above(determinant, zero));
    better = V::common(better, above(scale, zero));
    least = where(better, found, least);
    best_scale = where(better, scale, best_scale);
    best_low = where(better, bottom, best_low);
  }
  return {product(magnitude(best_scale), largest),
          product(magnitude(best_low), largest)};
}

}  // namespace
}  // namespace eqquant
