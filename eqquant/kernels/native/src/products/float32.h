// Products along the blocks, in float32, of any weight.
//
// For few rows of inputs, memory is the bottleneck: integers and points are multiplied
// without decoding, and sums are scaled, block by block. For many rows, numbers are
// decoded once for all of them.
#pragma once

#include <cstdint>

#include "products/float32_few_bytes.h"
#include "products/float32_few_digits.h"
#include "products/float32_few_rows.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/some_rows.h"
#include "weight/panel_reader.h"

namespace eqquant {
namespace {

// The number of codes that are decoded at a time: the decoded numbers fit in the first
// cache.
constexpr int64_t kDecodedCodes = 64;

// The largest number of adjacent panels of a task.
constexpr int64_t kDecodedPanels = 64;

// Returns the number of adjacent panels of a task: many, since long runs of consecutive
// memory are read fastest, but not so many that some threads have no task or that
// `floats` for each row of a panel leave the cache.
template <class V>
int64_t decoded_panels(const Blocks& w, int64_t floats, int64_t workers,
                       int64_t most = kDecodedPanels) {
  constexpr int64_t each = Numbers<V>::kRows;
  const int64_t shared = divided_up(w.n, workers * each);
  const int64_t cached = larger(1, (1 << 16) / (floats * each));
  return smaller(smaller(most, cached), shared);
}

// Whether sums of products are scaled, rather than numbers.
inline bool scales_sums(const Blocks& w, int64_t rows) {
  const bool points = w.point_type != PointType::kIntegers;
  return rows <= kFewRows && !(w.offset == Offset::kMinimum && points);
}

// Whether codes are read in the order of memory.
inline bool reads_in_order(const Blocks& w, int64_t rows) {
  return w.packing == Packing::kBits8 && !w.in_panels() && scales_sums(w, rows);
}

// Calls `add(piece, k, sums)` for each piece of each panel of the `count` rows of a
// weight from row `n`, with the position of its first code, and the panel's `each`
// sums, which are initially zero. It takes `together` consecutive pieces of each panel
// in turn, or all pieces that share bytes. After `summed` codes, sums are added up in
// float64.
template <class V, class Add>
void over_pieces(const Blocks& w, const Numbers<V>& numbers, int64_t together,
                 int64_t summed, int64_t each, int64_t n, int64_t count, float* sums,
                 Add add) {
  constexpr int64_t kRows = Numbers<V>::kRows;
  const int64_t panels = divided_up(count, kRows);
  LongSums<V> all(sums, panels * each, w.k, summed);
  together = larger(together, numbers.slices());
  Piece<V> piece;
  for (int64_t first = 0; first < numbers.pieces(); first += together) {
    for (int64_t p = 0; p < panels; ++p) {
      piece.ahead = numbers.ahead(p, panels, together);
      for (int64_t i = first; i < smaller(first + together, numbers.pieces()); ++i) {
        numbers.unpack(i, n + p * kRows, smaller(kRows, count - p * kRows), piece);
        add(piece, i * numbers.codes(), sums + p * each);
      }
    }
    all.reach((first + together) * numbers.codes());
  }
  all.finish();
}

template <class V>
bool all_finite(const float* x, int64_t number) {
  auto zeros = V::zero();
  for (int64_t i = 0; i < number; i += V::width) {
    const auto some = V::load(x + i);
    zeros = V::add(zeros, V::sub(some, some));
  }
  return V::nans(zeros) == 0;
}

// Multiplies the codes of pieces by `R` rows of inputs.
template <class V, class P, int R>
class FewRows {
 public:
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  FewRows(const Blocks& w, const FewInputs& x) : w_(w), x_(x), points_(w) {}

  // Adds the products with a piece, from position `k` on, to `sums`.
  EQQUANT_INNERMOST void add(const Piece<V>& piece, int64_t k, float* sums) const {
    typename V::Floats total[R][4];
    each([&](int r, int v) { total[r][v] = V::load(sums + r * kRows + v * W); });
    for (int64_t i = 0; i < piece.runs; ++i) add(piece, i, k, total);
    each([&](int r, int v) { V::store(sums + r * kRows + v * W, total[r][v]); });
  }

 private:
  template <class F>
  static void each(F f) {
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) f(r, v);
    }
  }

  void add(const Piece<V>& piece, int64_t i, int64_t start,
           typename V::Floats (*total)[4]) const {
    const int64_t at = i * kRows;
    const float* const x = x_.x + start;
    const Run run = piece.run[i];
    typename V::Floats sum[R][4], less[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) less[v] = V::load(piece.less + at + v * W);
    each([&](int r, int v) { sum[r][v] = V::zero(); });
    const uint8_t* c = piece.at + run.first * piece.stride;
    for (int64_t k = run.first; k < run.last; ++k, c += piece.stride) {
      typename V::Floats number[4];
      points_(c, less, number);
      each([&](int r, int v) {
        sum[r][v] = V::fma(number[v], V::all(x[r * w_.k + k]), sum[r][v]);
      });
    }
    each([&](int r, int v) {
      auto scale = V::load(piece.scale + at + v * W);
      if constexpr (P::kUnit != 1) scale = V::mul(scale, V::all(P::kUnit));
      total[r][v] = V::fma(sum[r][v], scale, total[r][v]);
    });
    if (w_.offset != Offset::kMinimum) return;
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto inputs = V::all(x_.sum(r, start + run.first, start + run.last));
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v)
        total[r][v] = V::fma(V::load(piece.rest + at + v * W), inputs, total[r][v]);
    }
  }

  const Blocks& w_;
  const FewInputs& x_;
  P points_;
};

// Multiplies decoded numbers by any number of rows of inputs.
template <class V>
class AnyRowsDecoded {
 public:
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  AnyRowsDecoded(const Blocks& w, const float* x, int64_t rows)
      : w_(w), x_(x), rows_(rows) {}

  void add(const float* panel, int64_t codes, int64_t k, float* sums) const {
    int64_t m = 0;
    const auto rows = [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (; m + R <= rows_; m += R)
        multiply<R>(panel, codes, x_ + m * w_.k + k, sums + m * kRows);
    };
    rows(Number<V::registers / 5>());
    if constexpr (V::registers > 16) rows(Number<3>());
    rows(Number<2>());
    rows(Number<1>());
  }

 private:
  template <int R>
  EQQUANT_INNERMOST void multiply(const float* panel, int64_t codes, const float* x,
                                  float* sums) const {
    typename V::Floats sum[R][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) sum[r][v] = V::zero();
    }
    for (int64_t k = 0; k < codes; ++k, ++x, panel += kRows) {
      typename V::Floats number[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) number[v] = V::load(panel + v * W);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto mine = V::all(x[r * w_.k]);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = V::fma(number[v], mine, sum[r][v]);
      }
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        EQQUANT_ADDED_UP(sum[r][v]);
        float* const to = sums + r * kRows + v * W;
        V::store(to, V::add(V::load(to), sum[r][v]));
      }
    }
  }

  const Blocks& w_;
  const float* x_;
  int64_t rows_;
};

template <class V>
class Decoded {
 public:
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  // `input_sums` has `FewInputs::number` floats.
  Decoded(const Blocks& w, const float* x, const float* input_sums, float* y,
          int64_t rows)
      : w_(w), numbers_(w), x_(x), few_{x, input_sums, w.k}, y_(y), rows_(rows) {}

  // Computes the products with the `count` rows of the weight from row `n`, which are
  // some panels. `sums` are `LongSums` of each of these and each row of inputs.
  void columns(int64_t n, int64_t count, float* sums) const {
    if (scales_sums(w_, rows_))
      with_points<V>(w_, [&](auto points) {
        using P = typename decltype(points)::type;
        switch (rows_) {
          case 1: return few<P, 1>(n, count, sums);
          case 2: return few<P, 2>(n, count, sums);
          case 3: return few<P, 3>(n, count, sums);
          case 4: return few<P, 4>(n, count, sums);
        }
      });
    else many(n, count, sums);
    store(n, count, sums, rows_ * kRows);
  }

  // The same products, from decoded numbers.
  void many(int64_t n, int64_t count, float* sums) const {
    const AnyRowsDecoded<V> rows(w_, x_, rows_);
    pieces(n, count, sums, [&](const Piece<V>& piece, int64_t k, float* mine) {
      alignas(64) float panel[kDecodedCodes * kRows];
      for (int64_t i = 0; i < piece.number; i += kDecodedCodes) {
        const int64_t last = smaller(i + kDecodedCodes, piece.number);
        numbers_.decode(piece, i, last, panel);
        rows.add(panel, last - i, k + i, mine);
      }
    });
  }

  // Writes the sums of panels, `each` floats apart, to `y`.
  void store(int64_t n, int64_t count, const float* sums, int64_t each) const {
    for (int64_t i = 0; i < count; i += W)
      for (int64_t m = 0; m < rows_; ++m)
        V::store(y_ + m * w_.n + n + i,
                 V::load(sums + i / kRows * each + m * kRows + i % kRows),
                 smaller(W, count - i));
  }

 private:
  template <class P, int R>
  void few(int64_t n, int64_t count, float* sums) const {
    if (!few_digits<V>(w_, numbers_, few_, rows_, n, count, sums)) {
      const int64_t whole = reads_in_order(w_, R) ? count / kRows : 0;
      const int64_t first = whole * kRows;
      if constexpr (P::kBytes)
        if (whole > 0) {
          float* const scratch = sums + LongSums<V>::floats(first * R, w_.k);
          FewBytes<V, P, R>(w_, numbers_, few_).columns(n, whole, sums, scratch);
        }
      const FewRows<V, P, R> rows(w_, few_);
      pieces(n + first, count - first, sums + first * R,
             [&](const Piece<V>& piece, int64_t k, float* mine) {
               rows.add(piece, k, mine);
             });
    }
    // Scaled sums may be infinite or NaN where sums of scaled numbers are not.
    for (int64_t i = 0; i < count; i += kRows) {
      float* const mine = sums + i * R;
      if (all_finite<V>(mine, R * kRows)) continue;
      alignas(64) float again[3 * R * kRows];
      many(n + i, smaller(kRows, count - i), again);
      for (int64_t j = 0; j < R * kRows; ++j)
        if (!__builtin_isfinite(mine[j])) mine[j] = again[j];
    }
  }

  template <class Add>
  void pieces(int64_t n, int64_t count, float* sums, Add add) const {
    over_pieces(w_, numbers_, 1, summed_codes(w_), rows_ * kRows, n, count, sums, add);
  }

  const Blocks& w_;
  Numbers<V> numbers_;
  const float* x_;
  FewInputs few_;
  float* y_;
  int64_t rows_;
};

// The number of adjacent rows of the weight that a task takes, and the number of floats
// that it needs for each of them.
template <class V>
struct DecodedTasks {
  int64_t together, floats;

  DecodedTasks(const Blocks& w, int64_t rows, int64_t workers) {
    const bool in_order = reads_in_order(w, rows);
    const int64_t beside = in_order ? rows + 3 : 0;
    together = Numbers<V>::kRows * decoded_panels<V>(w, rows + beside, workers,
                                                     in_order ? w.n : kDecodedPanels);
    floats = LongSums<V>::floats(rows, w.k) + beside;
  }

  int64_t number(const Blocks& w) const { return divided_up(w.n, together); }
};

template <class V>
int64_t float32_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  int64_t most = 0;
  in_some_rows(rows, [&](int64_t, int64_t some) {
    const DecodedTasks<V> tasks(w, some, workers);
    const int64_t mine = tasks.floats * tasks.together;
    most = larger(most, smaller(workers, tasks.number(w)) * mine +
                            FewInputs::number(w, some));
  });
  return most;
}

template <class V>
void decoded_rows(const Blocks& w, const float* x, float* y, int64_t rows,
                  float* scratch, const Parallel& parallel) {
  const DecodedTasks<V> tasks(w, rows, parallel.workers);
  const int64_t number = tasks.number(w), mine = tasks.floats * tasks.together;
  float* const input_sums = scratch + smaller(parallel.workers, number) * mine;
  FewInputs::sum_up(w, x, rows, input_sums);
  const Decoded<V> product(w, x, input_sums, y, rows);
  parallel(number, [&](int64_t i, int64_t worker) {
    const int64_t n = i * tasks.together;
    const int64_t count = smaller(tasks.together, w.n - n);
    in_turns(w, n, count, [&](int64_t first, int64_t some) {
      product.columns(first, some, scratch + worker * mine);
    });
  });
}

template <class V>
void float32(const Blocks& w, const float* x, float* y, int64_t rows, float* scratch,
             const Parallel& parallel) {
  in_some_rows(rows, [&](int64_t m, int64_t some) {
    decoded_rows<V>(w, x + m * w.k, y + m * w.n, some, scratch, parallel);
  });
}

template <class V>
constexpr void add_float32(Kernels& found) {
  found.float32_scratch = float32_scratch<V>;
  found.float32 = float32<V>;
}

}  // namespace
}  // namespace eqquant
