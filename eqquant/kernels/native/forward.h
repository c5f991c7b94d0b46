// Products along the blocks, in float32: `y[m, n] = x[m, k] @ W[n, k].T`.
//
// Some columns of `y` are taken at a time, one to each lane. What a byte adds to a sum
// comes from terms, some for each byte and row of `x`: the inputs themselves, or sums
// of them that the byte's digits look up (the Method of Four Russians).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace eqquant {
namespace {

// What the digits of a byte stand for, taken apart: the byte's first digits index a
// table of `low` entries, the others one of 16.
struct Split {
  int64_t first;  // how many digits the first table is for
  int64_t low;    // how many entries it has
  int64_t base;
};

constexpr Split split_of(Codes kind) {
  switch (kind) {
    case Codes::kQuarters: return {2, 16, 4};
    case Codes::kTrits: return {3, 32, 3};
    case Codes::kBits: return {4, 16, 2};
    default: return {0, 0, 0};
  }
}

// How many terms a byte has.
constexpr int64_t terms_of(Codes kind) {
  return split_of(kind).low > 0 ? split_of(kind).low + 16 : codes_per_byte(kind);
}

inline int64_t power(int64_t base, int64_t exponent) {
  return exponent == 0 ? 1 : base * power(base, exponent - 1);
}

// The table of all sums that a byte's digits can look up.
template <Codes kind>
void fill_terms(const Weight& w, const float* x, float* terms, int64_t bytes) {
  constexpr Split split = split_of(kind);
  constexpr int64_t per = codes_per_byte(kind), size = terms_of(kind);
  alignas(64) float point[per][size] = {};
  for (int64_t i = 0; i < per; ++i) {
    bool low = i < split.first;
    int64_t weight = power(split.base, low ? i : i - split.first);
    for (int64_t e = 0; e < (low ? split.low : 16); ++e)
      point[i][low ? e : split.low + e] = w.points[e / weight % split.base];
  }
  for (int64_t b = 0; b < bytes; ++b)
    for (int64_t e = 0; e < size; ++e) {
      float sum = 0;
      for (int64_t i = 0; i < per; ++i) sum += point[i][e] * x[b * per + i];
      terms[b * size + e] = sum;
    }
}

// Adds what `U` vectors of bytes add to the sums of `R` rows.
template <class V, Codes kind>
struct Step;

template <class V>
struct Step<V, Codes::kInt8> {
  explicit Step(const Weight&) {}

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
struct Step<V, Codes::kNibbles> {
  typename V::Table16 table;

  explicit Step(const Weight& w) : table(w.points) {}

  template <int R, int apart>
  void add(typename V::Ints c, const float* terms, int64_t stride,
           typename V::Floats* sums) const {
    auto low = table[c], high = table[V::template right<4>(c)];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      auto& sum = sums[r * apart];
      sum = V::fma(low, V::all(terms[r * stride]), sum);
      sum = V::fma(high, V::all(terms[r * stride + 1]), sum);
    }
  }
};

template <class V, Codes kind>
struct Step {
  explicit Step(const Weight&) {}

  template <int R, int apart>
  void add(typename V::Ints c, const float* terms, int64_t stride,
           typename V::Floats* sums) const {
    typename V::Ints low = c, high;
    if constexpr (kind == Codes::kTrits) {
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
      sum = V::add(sum, typename V::Table16(mine + split_of(kind).low)[high]);
    }
  }

 private:
  static typename V::Floats lookup(const float* entries, typename V::Ints i) {
    if constexpr (split_of(kind).low == 32)
      return typename V::Table32(entries)[i];
    else
      return typename V::Table16(entries)[i];
  }
};

// How many bytes of a row are added up before they are scaled, and of how many columns:
// few enough that a float32 does not drift, and that the codes stay in a cache while
// all rows of `x` meet them.
constexpr int64_t kForwardBytes = 64;
constexpr int64_t kForwardColumns = 512;

// How many rows of `x` that is, at most.
constexpr int64_t kForwardRows = 16;

template <class V, Codes kind>
class Forward {
 public:
  static constexpr int64_t per = codes_per_byte(kind), size = terms_of(kind);

  Forward(const Weight& w, const float* x, const float* terms, float* y, int64_t rows)
      : w_(w), step_(w), x_(x), terms_(terms), y_(y), rows_(rows) {}

  void columns(int64_t begin, int64_t end) const {
    for (int64_t g = 0; g < w_.blocks; ++g) {
      int64_t first = g * w_.block, last = smaller(first + w_.block, w_.bytes);
      for (int64_t b = first; b < last; b += kForwardBytes)
        bytes(g, b, smaller(b + kForwardBytes, last), begin, end);
    }
  }

 private:
  void bytes(int64_t g, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    constexpr int wide = V::registers / 8;
    int64_t r = 0;
    for (; r + 4 <= rows_; r += 4) some<4, wide>(r, g, first, last, begin, end);
    switch (rows_ - r) {
      case 3: return some<3, wide>(r, g, first, last, begin, end);
      case 2: return some<2, wide>(r, g, first, last, begin, end);
      case 1: return some<1, 4>(r, g, first, last, begin, end);
    }
  }

  // Of `R` rows, `U` vectors at a time.
  template <int R, int U>
  void some(int64_t row, int64_t g, int64_t first, int64_t last, int64_t begin,
            int64_t end) const {
    constexpr int64_t W = V::width;
    float less[R] = {};
    if (w_.zero != nullptr)
      for (int r = 0; r < R; ++r) {
        const float* x = x_ + (row + r) * w_.bytes * per;
        for (int64_t k = first * per; k < last * per; ++k) less[r] += x[k];
      }
    int64_t n = begin;
    for (; n + U * W <= end; n += U * W)
      sums<R, U, false>(row, g, first, last, n, W, less);
    for (; n + W <= end; n += W) sums<R, 1, false>(row, g, first, last, n, W, less);
    if (n < end) sums<R, 1, true>(row, g, first, last, n, end - n, less);
  }

  template <int R, int U, bool part>
  void sums(int64_t row, int64_t g, int64_t first, int64_t last, int64_t n,
            int64_t count, const float* less) const {
    constexpr int64_t W = V::width;
    const int64_t stride = w_.bytes * size;
    const float* terms = terms_ + row * stride;
    typename V::Floats sum[R * U];
    EQQUANT_UNROLL
    for (int i = 0; i < R * U; ++i) sum[i] = V::zero();
    for (int64_t b = first; b < last; ++b) {
      const uint8_t* c = w_.codes + b * w_.n + n;
      if constexpr (!part)
        // What comes next of these columns.
        _mm_prefetch(reinterpret_cast<const char*>(c + (last - first) * w_.n),
                     _MM_HINT_T0);
      EQQUANT_UNROLL
      for (int u = 0; u < U; ++u) {
        constexpr bool sign = kind == Codes::kInt8;
        auto codes = part ? V::template bytes<sign>(c, count)
                          : V::template bytes<sign>(c + u * W);
        step_.template add<R, U>(codes, terms + b * size, stride, sum + u);
      }
    }
    EQQUANT_UNROLL
    for (int u = 0; u < U; ++u) {
      const int64_t at = n + u * W;
      const auto scale = V::scales(w_, g, at, count);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        auto s = sum[r * U + u];
        if (w_.zero != nullptr) {
          auto zero =
              V::to_floats(V::template bytes<false>(w_.zero + g * w_.n + at, count));
          s = V::fma(zero, V::all(-less[r]), s);
        }
        float* y = y_ + (row + r) * w_.n + at;
        auto old = first == 0 ? V::zero() : V::load(y, count);
        V::store(y, V::fma(s, scale, old), count);
      }
    }
  }

  const Weight& w_;
  Step<V, kind> step_;
  const float* x_;
  const float* terms_;
  float* y_;
  int64_t rows_;
};

template <class V, Codes kind>
void forward_of(const Weight& w, const float* x, float* y, int64_t rows, float* scratch,
                const Parallel& parallel) {
  constexpr int64_t size = terms_of(kind);
  const int64_t row = w.bytes * codes_per_byte(kind);
  for (int64_t m = 0; m < rows; m += kForwardRows) {
    const int64_t count = smaller(kForwardRows, rows - m);
    const float* mine = x + m * row;
    const float* terms = mine;
    if constexpr (split_of(kind).low > 0) {
      parallel(count, [&](int64_t i, int64_t) {
        fill_terms<kind>(w, mine + i * row, scratch + i * w.bytes * size, w.bytes);
      });
      terms = scratch;
    }
    const Forward<V, kind> product(w, mine, terms, y + m * w.n, count);
    // Several for each thread, if they do not become too narrow.
    const int64_t each = divided_up(w.n, 4 * parallel.workers * 64) * 64;
    const int64_t size = smaller(kForwardColumns, larger(128, each));
    const int64_t tasks = larger(1, w.n / size);
    parallel(tasks, [&](int64_t i, int64_t) {
      product.columns(i * size, i + 1 == tasks ? w.n : (i + 1) * size);
    });
  }
}

inline int64_t forward_scratch(const Weight& w, int64_t rows) {
  bool looks_up = split_of(w.kind).low > 0;
  return looks_up ? smaller(rows, kForwardRows) * w.bytes * terms_of(w.kind) : 0;
}

template <class V>
void forward(const Weight& w, const float* x, float* y, int64_t rows, float* scratch,
             const Parallel& parallel) {
  switch (w.kind) {
    case Codes::kInt8:
      return forward_of<V, Codes::kInt8>(w, x, y, rows, scratch, parallel);
    case Codes::kNibbles:
      return forward_of<V, Codes::kNibbles>(w, x, y, rows, scratch, parallel);
    case Codes::kQuarters:
      return forward_of<V, Codes::kQuarters>(w, x, y, rows, scratch, parallel);
    case Codes::kTrits:
      return forward_of<V, Codes::kTrits>(w, x, y, rows, scratch, parallel);
    case Codes::kBits:
      return forward_of<V, Codes::kBits>(w, x, y, rows, scratch, parallel);
  }
}

}  // namespace
}  // namespace eqquant
