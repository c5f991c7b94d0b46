// Products along the blocks, in float32: `y[m, n] = x[m, k] @ W[n, k].T`. A vector
// computes consecutive columns of `y`, one per lane.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/terms.h"

namespace eqquant {
namespace {

// A range of bytes of each row of a weight, all in the same block.
struct Bytes {
  int64_t block, first, last;

  // Returns at most `most` bytes from `first`.
  static Bytes of(const Blocks& w, int64_t first, int64_t most, int64_t last) {
    const int64_t block = first / w.in_bytes.block;
    return {block, first,
            smaller(smaller(first + most, last), (block + 1) * w.in_bytes.block)};
  }
};

// The terms of some bytes for rows of inputs, `stride` apart: see `products/terms.h`.
struct Inputs {
  const float* terms;
  int64_t stride;
};

// A way to add the contribution of some bytes to many columns of `y` at a time, if
// there is one: returns the first column that it does not compute.
// (`products/nibbles.h` has one for some sets.)
template <class V, Packing packing>
class ManyColumns {
 public:
  explicit ManyColumns(const Blocks&) {}
  template <int R>
  int64_t add(Bytes, Inputs, int64_t begin, int64_t, float*, bool, bool) const {
    return begin;
  }
};

// Adds the contribution of some bytes to some columns of `y`.
template <class V, Packing packing>
class Sums {
 public:
  // If `scaled`, multiplies sums by the scales of their block.
  Sums(const Blocks& w, bool scaled) : w_(w), step_(w), many_(w), scaled_(scaled) {}

  // For `R` rows of `x`, `U` vectors at a time: `R * U` accumulators stay in registers.
  // If `fresh`, `y` is overwritten instead of added to.
  template <int R, int U>
  void add(Bytes b, Inputs x, int64_t begin, int64_t end, float* y, bool fresh) const {
    if constexpr (U == 4)
      begin = many_.template add<R>(b, x, begin, end, y, fresh, scaled_);
    if constexpr (packing == Packing::kBits4)
      if (w_.zero_points != nullptr) return add<R, U, true>(b, x, begin, end, y, fresh);
    add<R, U, false>(b, x, begin, end, y, fresh);
  }

 private:
  template <int R, int U, bool zeros>
  void add(Bytes b, Inputs x, int64_t begin, int64_t end, float* y, bool fresh) const {
    int64_t n = some<R, U, zeros, false>(b, x, begin, end, y, fresh);
    n = some<R, 1, zeros, false>(b, x, n, end, y, fresh);
    some<R, 1, zeros, true>(b, x, n, end, y, fresh);
  }

  // Computes the columns of whole vectors, or if `part`, of the last, partial vector.
  // Returns the next column.
  template <int R, int U, bool zeros, bool part>
  int64_t some(Bytes of, Inputs x, int64_t n, int64_t end, float* y, bool fresh) const {
    constexpr int64_t W = V::width;
    for (; part ? n < end : n + U * W <= end; n += U * W) {
      const int64_t count = part ? end - n : W;
      typename V::Floats sum[R * U];
      EQQUANT_UNROLL
      for (int i = 0; i < R * U; ++i) sum[i] = V::zero();
      typename V::Floats zero[U];
      if constexpr (zeros) {
        EQQUANT_UNROLL
        for (int u = 0; u < U; ++u)
          zero[u] = V::to_floats(V::template bytes<false>(
              w_.zero_points + of.block * w_.n + n + u * W, count));
      }
      const float* terms = x.terms;
      for (int64_t b = of.first; b < of.last; ++b, terms += terms_of(packing)) {
        const uint8_t* c = w_.bytes + b * w_.n + n;
        if constexpr (!part)
          // Prefetch the next bytes of these columns.
          prefetch<2>(c + (of.last - of.first) * w_.n);
        EQQUANT_UNROLL
        for (int u = 0; u < U; ++u) {
          constexpr bool sign = packing == Packing::kBits8;
          auto codes = part ? V::template bytes<sign>(c, count)
                            : V::template bytes<sign>(c + u * W);
          if constexpr (zeros)
            step_.template add_less<R, U>(zero[u], codes, terms, x.stride, sum + u);
          else
            step_.template add<R, U>(codes, terms, x.stride, sum + u);
        }
      }
      EQQUANT_UNROLL
      for (int u = 0; u < U; ++u) {
        const int64_t at = n + u * W;
        const auto scale =
            scaled_ ? V::scales(w_.scales, of.block, at, count) : V::all(1);
        EQQUANT_UNROLL
        for (int r = 0; r < R; ++r) {
          float* mine = y + r * w_.n + at;
          auto old = fresh ? V::zero() : V::load(mine, count);
          V::store(mine, V::fma(sum[r * U + u], scale, old), count);
        }
      }
    }
    return n;
  }

  const Blocks& w_;
  Step<V, packing> step_;
  ManyColumns<V, packing> many_;
  bool scaled_;
};

// With many rows of `x`, arithmetic is the bottleneck. A tile of this many bytes and
// columns is accumulated at a time: small enough that rounding errors do not build up,
// and that its codes stay in cache for all rows of `x`.
constexpr int64_t kForwardBytes = 64;
constexpr int64_t kForwardColumns = 512;

// The number of successive additions to a sum before it is added up in float64: in a
// tile, and in several tiles.
constexpr int64_t kForwardAdditions = 144;

// The number of rows of `x` that pass over the weight together.
constexpr int64_t kForwardRows = 16;

template <class V, Packing packing>
void forward_many(const Blocks& w, const float* x, float* y, int64_t rows,
                  float* scratch, const Parallel& parallel) {
  constexpr int64_t size = terms_of(packing);
  const int64_t stride = w.in_bytes.row * codes_per_byte(packing);
  Inputs all = {x, stride};
  if constexpr (Terms<packing>::looked_up) {
    const Terms<packing> terms(w);
    parallel(rows, [&](int64_t r, int64_t) {
      terms.fill(x + r * stride, scratch + r * w.in_bytes.row * size, w.in_bytes.row);
    });
    all = {scratch, w.in_bytes.row * size};
  }
  const Sums<V, packing> sums(w, true);
  // Computes the bytes from `first` to `last`. (Not inlined, so that sums stay in
  // registers.)
  const auto part = [&](int64_t first, int64_t last, int64_t begin,
                        int64_t end) EQQUANT_INNERMOST {
    for (Bytes b = {0, first, first}; b.last < last;) {
      b = Bytes::of(w, b.last, kForwardBytes, last);
      constexpr int wide = V::registers / 8;
      const auto add = [&](auto number, int64_t r) {
        constexpr int R = decltype(number)::value;
        const Inputs mine = {all.terms + r * all.stride + b.first * size, all.stride};
        sums.template add<R, R == 1 ? 4 : wide>(b, mine, begin, end, y + r * w.n,
                                                b.first == 0);
      };
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) add(Number<4>(), r);
      switch (rows - r) {
        case 3: add(Number<3>(), r); break;
        case 2: add(Number<2>(), r); break;
        case 1: add(Number<1>(), r); break;
      }
    }
  };
  constexpr int64_t of_byte = packing == Packing::kBits8 ? 1 : 2;
  const int64_t tile = smaller(kForwardBytes, w.in_bytes.block);
  const int64_t each = (kForwardAdditions - of_byte * tile) * tile;
  const auto columns = [&](int64_t begin, int64_t end) {
    alignas(64) float wide[kForwardRows * 2 * 2 * kForwardColumns];
    LongSums<V> found(y + begin, rows, end - begin, w.n, wide, w.in_bytes.row, each);
    for (int64_t b = 0; b < w.in_bytes.row; b += each) {
      part(b, smaller(b + each, w.in_bytes.row), begin, end);
      found.reach(b + each);
    }
    found.finish();
  };
  // Several tasks for each thread, unless they would become too narrow.
  const int64_t shared = divided_up(w.n, 4 * parallel.workers * 64) * 64;
  const int64_t width = smaller(kForwardColumns, larger(128, shared));
  const int64_t tasks = larger(1, w.n / width);
  parallel(tasks, [&](int64_t i, int64_t) {
    columns(i * width, i + 1 == tasks ? w.n : (i + 1) * width);
  });
}

// With few rows of `x`, memory is the bottleneck, and it is fastest to read in order.
// So a few bytes of each row of the weight are swept over all columns. The bytes of a
// row are split into parts, which different threads sum and `sum_up` adds.
constexpr int64_t kSweepRows = 3;

// The number of bytes of a row that are swept: fewer if their terms are tables, or if a
// vector has many columns.
template <class V, Packing packing>
constexpr int64_t sweep_bytes() {
  return V::registers > 16 || Terms<packing>::looked_up ? 8 : 16;
}

// The number of bytes of a part, except the last: few enough that rounding errors do
// not build up. The sums of parts are added up in float64.
inline int64_t sweep_part(const Blocks& w) {
  const int64_t parts = smaller(8, larger(1, w.in_bytes.row / 128));
  return smaller(1024, divided_up(w.in_bytes.row, 16 * parts) * 16);
}

inline int64_t sweep_parts(const Blocks& w) {
  return divided_up(w.in_bytes.row, sweep_part(w));
}

template <class V, Packing packing, int R>
class Sweep {
 public:
  static constexpr int64_t kBytes = sweep_bytes<V, packing>();

  Sweep(const Blocks& w, const float* x, float* y, float* scratch)
      : w_(w), x_(x), y_(y), scratch_(scratch), terms_(w), sums_(w, !late()) {}

  void part(int64_t i, int64_t begin, int64_t end) const {
    constexpr int64_t size = terms_of(packing), per = codes_per_byte(packing);
    const int64_t first = i * sweep_part(w_), stride = w_.in_bytes.row * per;
    const int64_t last = smaller(first + sweep_part(w_), w_.in_bytes.row);
    alignas(64) float terms[R * kBytes * size];
    for (Bytes b = {0, first, first}; b.last < last;) {
      b = Bytes::of(w_, b.last, kBytes, last);
      const float* x = x_ + b.first * per;
      Inputs inputs = {x, stride};
      if constexpr (Terms<packing>::looked_up) {
        inputs = {terms, kBytes * size};
        for (int64_t r = 0; r < R; ++r)
          terms_.fill(x + r * stride, terms + r * inputs.stride, b.last - b.first);
      }
      sums_.template add<R, 4>(b, inputs, begin, end, of_part(i), b.first == first);
    }
  }

  // Adds the parts, once all are computed.
  void sum_up(int64_t begin, int64_t end) const {
    const int64_t parts = sweep_parts(w_);
    if (parts == 1 && !late()) return;
    for (int64_t n = begin; n < end; n += V::width) {
      const int64_t count = smaller(V::width, end - n);
      const auto scale = late() ? V::scales(w_.scales, 0, n, count) : V::all(1);
      for (int64_t r = 0; r < R; ++r) {
        auto sum = V::wide(V::load(y_ + r * w_.n + n, count));
        for (int64_t i = 1; i < parts; ++i)
          sum = V::add(sum, V::load(of_part(i) + r * w_.n + n, count));
        V::store(y_ + r * w_.n + n, V::mul(V::narrow(sum), scale), count);
      }
    }
  }

 private:
  // With one scale per row, `sum_up` can apply it to the total.
  bool late() const { return w_.in_bytes.blocks == 1; }
  float* of_part(int64_t i) const {
    return i == 0 ? y_ : scratch_ + (i - 1) * R * w_.n;
  }

  const Blocks& w_;
  const float* x_;
  float* y_;
  float* scratch_;
  Terms<packing> terms_;
  Sums<V, packing> sums_;
};

template <class V, Packing packing, int R>
void forward_few(const Blocks& w, const float* x, float* y, float* scratch,
                 const Parallel& parallel) {
  const Sweep<V, packing, R> sweep(w, x, y, scratch);
  const int64_t parts = sweep_parts(w);
  // Split the columns, too, if there are many threads and enough columns.
  const int64_t pieces =
      larger(1, smaller(w.n / 1024, divided_up(4 * parallel.workers, parts)));
  const auto columns = [&](int64_t i) { return divided_up(i * w.n, pieces * 64) * 64; };
  parallel(parts * pieces, [&](int64_t i, int64_t) {
    const int64_t piece = i % pieces;
    sweep.part(i / pieces, columns(piece), smaller(columns(piece + 1), w.n));
  });
  parallel(pieces, [&](int64_t i, int64_t) {
    sweep.sum_up(columns(i), smaller(columns(i + 1), w.n));
  });
}

template <class V, Packing packing>
void forward_of(const Blocks& w, const float* x, float* y, int64_t rows, float* scratch,
                const Parallel& parallel) {
  switch (rows) {
    case 1: return forward_few<V, packing, 1>(w, x, y, scratch, parallel);
    case 2: return forward_few<V, packing, 2>(w, x, y, scratch, parallel);
    case 3: return forward_few<V, packing, 3>(w, x, y, scratch, parallel);
  }
  for (int64_t m = 0; m < rows; m += kForwardRows)
    forward_many<V, packing>(w, x + m * w.in_bytes.row * codes_per_byte(packing),
                             y + m * w.n, smaller(kForwardRows, rows - m), scratch,
                             parallel);
}

inline int64_t lookup_tables_scratch(const Blocks& w, int64_t rows) {
  if (rows <= kSweepRows) return (sweep_parts(w) - 1) * rows * w.n;
  const bool looked_up = split_of(w.packing).low > 0;
  return looked_up ? smaller(rows, kForwardRows) * w.in_bytes.row * terms_of(w.packing)
                   : 0;
}

template <class V>
void lookup_tables(const Blocks& w, const float* x, float* y, int64_t rows,
                   float* scratch, const Parallel& parallel) {
  with_whole_bytes(w.packing, [&](auto packing) {
    forward_of<V, decltype(packing)::value>(w, x, y, rows, scratch, parallel);
  });
}

template <class V>
constexpr void add_lookup_tables(Kernels& found) {
  found.lookup_tables_scratch = lookup_tables_scratch;
  found.lookup_tables = lookup_tables<V>;
}

}  // namespace
}  // namespace eqquant
