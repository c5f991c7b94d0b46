// The contribution of a byte of the weight to a product in float32.
//
// It is computed from the byte's terms, which differ for each row of `x`: the inputs
// themselves, or for small digits two tables of partial sums of the inputs, which the
// digits index (the Method of Four Russians).
#pragma once

#include <cstdint>

#include "products/kernels.h"

namespace eqquant {
namespace {

// How the digits of a byte index two tables: the first digits a table of `low` entries,
// the others a table of 16.
struct Split {
  int64_t first;  // the number of digits that index the first table
  int64_t low;    // the number of its entries
  int64_t base;
};

constexpr Split split_of(Packing packing) {
  switch (packing) {
    case Packing::kBits2: return {2, 16, 4};
    case Packing::kTrits: return {3, 32, 3};
    case Packing::kBits1: return {4, 16, 2};
    default: return {0, 0, 0};
  }
}

// The number of terms of a byte.
constexpr int64_t terms_of(Packing packing) {
  return split_of(packing).low > 0 ? split_of(packing).low + 16
                                   : codes_per_byte(packing);
}

inline int64_t power(int64_t base, int64_t exponent) {
  return exponent == 0 ? 1 : base * power(base, exponent - 1);
}

// Computes the terms of bytes from the inputs that they multiply.
template <Packing packing>
class Terms {
 public:
  static constexpr int64_t per = codes_per_byte(packing), size = terms_of(packing);
  static constexpr Split split = split_of(packing);
  static constexpr bool looked_up = split.low > 0;

  explicit Terms(const Blocks& w) {
    if constexpr (looked_up)
      for (int64_t i = 0; i < per; ++i) {
        bool low = i < split.first;
        int64_t weight = power(split.base, low ? i : i - split.first);
        for (int64_t e = 0; e < (low ? split.low : 16); ++e)
          point_[i][low ? e : split.low + e] = w.points[e / weight % split.base];
      }
  }

  void fill(const float* x, float* terms, int64_t bytes) const {
    for (int64_t b = 0; b < bytes; ++b, x += per, terms += size) {
      fill<0, split.first, 0, split.low>(x, terms);
      fill<split.first, per, split.low, size>(x, terms);
    }
  }

 private:
  // Fills one of the two tables. (It sums only its own inputs: zero times an infinite
  // input of the other table would be NaN.)
  template <int64_t i, int64_t i_end, int64_t e, int64_t e_end>
  void fill(const float* x, float* terms) const {
    for (int64_t k = e; k < e_end; ++k) {
      float sum = 0;
      for (int64_t j = i; j < i_end; ++j) sum += point_[j][k] * x[j];
      terms[k] = sum;
    }
  }

  alignas(64) float point_[per][size] = {};
};

// Adds the contributions of a vector of bytes to the sums of `R` rows, which are
// `apart` apart in the array of sums.
template <class V, Packing packing>
struct Step;

template <class V>
struct Step<V, Packing::kBits8> {
  explicit Step(const Blocks&) {}

  template <int R, int apart>
  void add(typename V::Ints c, const float* terms, int64_t stride,
           typename V::Floats* sums) const {
    auto w = V::to_floats(c);
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r)
      sums[r * apart] = V::fma(w, V::all(terms[r * stride]), sums[r * apart]);
  }
};

template <class V>
struct Step<V, Packing::kBits4> {
  explicit Step(const Blocks& w) : table(w.points) {}

  template <int R, int apart>
  void add(typename V::Ints c, const float* terms, int64_t stride,
           typename V::Floats* sums) const {
    add<R, apart>(table[c], table[V::template right<4>(c)], terms, stride, sums);
  }

  // The same with a zero-point subtracted from the points.
  template <int R, int apart>
  void add_less(typename V::Floats zero, typename V::Ints c, const float* terms,
                int64_t stride, typename V::Floats* sums) const {
    const auto low = table[c], high = table[V::template right<4>(c)];
    add<R, apart>(V::sub(low, zero), V::sub(high, zero), terms, stride, sums);
  }

 private:
  template <int R, int apart>
  static void add(typename V::Floats low, typename V::Floats high, const float* terms,
                  int64_t stride, typename V::Floats* sums) {
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      auto& sum = sums[r * apart];
      sum = V::fma(low, V::all(terms[r * stride]), sum);
      sum = V::fma(high, V::all(terms[r * stride + 1]), sum);
    }
  }

  typename V::Table16 table;
};

template <class V, Packing packing>
struct Step {
  explicit Step(const Blocks&) {}

  template <int R, int apart>
  void add(typename V::Ints c, const float* terms, int64_t stride,
           typename V::Floats* sums) const {
    typename V::Ints low = c, high;
    if constexpr (packing == Packing::kTrits) {
      high = V::template right<9>(V::times(c, 19));  // c / 27
      low = V::minus(c, V::times(high, 27));
    } else {
      high = V::template right<4>(c);
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      auto& sum = sums[r * apart];
      const float* mine = terms + r * stride;
      sum = V::add(sum, lookup(mine, low));
      sum = V::add(sum, typename V::Table16(mine + split_of(packing).low)[high]);
    }
  }

 private:
  static typename V::Floats lookup(const float* entries, typename V::Ints i) {
    if constexpr (split_of(packing).low == 32)
      return typename V::Table32(entries)[i];
    else
      return typename V::Table16(entries)[i];
  }
};

}  // namespace
}  // namespace eqquant
