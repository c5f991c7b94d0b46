// Products of weights along their blocks, in 16-bit integers: unscaled points of codes
// by inputs that are rounded in a unit of their row.
//
// The sum of a run of codes is exact, in 32 bits. It is scaled, and added to a float32.
#pragma once

#include <cstdint>

#include "products/dot_words.h"
#include "products/float32.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/round_inputs.h"
#include "products/some_rows.h"
#include "weight/block_scales.h"
#include "weight/panel_of_words.h"
#include "weight/panel_reader.h"
#include "weight/words_of_quads.h"

namespace eqquant {
namespace {

// Makes words of the codes of pieces one by one, and appends them to panels.
template <class V>
class WordsOfPieces {
 public:
  using Ints = typename V::Ints;
  static constexpr int64_t kRows = PanelOfWords<V>::kRows, W = V::width;

  // The points of the table are scaled by `unit`.
  WordsOfPieces(const Blocks& w, float unit)
      : w_(w), per_unit_(1 / unit), table_(w.points) {
    if (w.point_type == PointType::kTable) {
      append_ = has_few_points(w) ? &WordsOfPieces::append_as<Kind::kTable>
                                  : &WordsOfPieces::append_as<Kind::kFloats>;
    } else if (!is_wide(w) || w.point_type == PointType::kSigned) {
      append_ = &WordsOfPieces::append_as<Kind::kSigned>;
    } else if (w.packing == Packing::kBits8) {
      append_ = &WordsOfPieces::append_as<Kind::kUnsignedLess>;
    } else {
      append_ = &WordsOfPieces::append_as<Kind::kSignedLess>;
    }
  }

  // Appends a piece, which begins at position `k` of the row.
  void append(const Piece<V>& piece, int64_t k, PanelOfWords<V>& panel) const {
    const int64_t start = panel.number;
    for (int64_t i = 0; i < piece.runs; ++i) {
      const Run run = {start + piece.run[i].first, start + piece.run[i].last};
      if (i == 0 && start > 0 && !is_gguf(w_.packing) && k % w_.block != 0) {
        // This continues a block.
        panel.run[panel.runs - 1].last = run.last;
        continue;
      }
      float* const scale = panel.scale + panel.runs * kRows;
      float* const rest = panel.rest + panel.runs * kRows;
      for (int v = 0; v < 4; ++v) {
        V::store(scale + v * W, V::load(piece.scale + i * kRows + v * W));
        if (w_.offset == Offset::kMinimum)
          V::store(rest + v * W, V::mul(V::load(minima(piece) + i * kRows + v * W),
                                        V::all(per_unit_)));
      }
      panel.run[panel.runs++] = run;
    }
    (this->*append_)(piece, panel.pairs + start / 2 * kRows);
    panel.number += piece.number;
  }

 private:
  // How codes become integers: unchanged, or less the parameter of their run; by a
  // table of 16; or by way of floats.
  enum class Kind { kSigned, kSignedLess, kUnsignedLess, kTable, kFloats };

  const float* minima(const Piece<V>& piece) const {
    return w_.point_type == PointType::kIntegers ? piece.rest : piece.minimum;
  }

  template <Kind kind>
  EQQUANT_INNERMOST void append_as(const Piece<V>& piece, int32_t* pairs) const {
    for (int64_t r = 0; r < piece.runs; ++r) {
      typename V::Floats less[4];
      Ints words[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        less[v] = is_wide(w_) ? V::load(piece.less + r * kRows + v * W) : V::zero();
        const Ints one = V::to_ints(less[v]);
        words[v] = V::side_by_side(one, one);
      }
      for (int64_t k = piece.run[r].first; k < piece.run[r].last; k += 2) {
        const uint8_t* const a = piece.at + k * piece.stride;
        // (A row may end with an odd number of codes: the missing one is multiplied by
        // zero.)
        const uint8_t* const b = k + 1 < piece.run[r].last ? a + piece.stride : a;
        int32_t* const to = pairs + k / 2 * kRows;
        if constexpr (kind == Kind::kFloats) {
          const TablePoints<V, typename V::Table256> points(w_);
          typename V::Floats first[4], second[4];
          points(a, less, first);
          points(b, less, second);
          EQQUANT_UNROLL
          for (int v = 0; v < 4; ++v)
            V::store(to + v * W,
                     V::side_by_side(V::to_ints(first[v]), V::to_ints(second[v])));
          continue;
        }
        constexpr bool sign = kind == Kind::kSigned || kind == Kind::kSignedLess;
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          Ints two = V::side_by_side(V::template bytes<sign>(a + v * W),
                                     V::template bytes<sign>(b + v * W));
          if constexpr (kind == Kind::kTable) two = table_[two];
          else if constexpr (kind != Kind::kSigned) two = V::minus_words(two, words[v]);
          V::store(to + v * W, two);
        }
      }
    }
  }

  const Blocks& w_;
  float per_unit_;
  void (WordsOfPieces::*append_)(const Piece<V>&, int32_t*) const;
  typename V::WordTable table_;
};

template <class V>
class DecodedIntegers {
 public:
  using Ints = typename V::Ints;
  static constexpr int64_t kRows = PanelOfWords<V>::kRows, W = V::width;

  DecodedIntegers(const Blocks& w, const Words& x, float unit, float* y)
      : w_(w),
        x_(x),
        numbers_(w),
        words_(w, unit),
        fours_(w, unit),
        summed_(codes_in_a_sum(w)),
        unit_(unit),
        y_(y) {}

  // Computes the products with the `count` rows of the weight from row `n`, which are
  // some panels. `sums` are `LongSums` of each of these and each row of inputs.
  void columns(int64_t n, int64_t count, float* sums) const {
    const int64_t panels = divided_up(count, kRows), each = x_.rows * kRows;
    LongSums<V> all(sums, panels * each, w_.k, summed_codes(w_));
    const int64_t together = larger(1, kWordsCodes / numbers_.codes());
    Piece<V> piece;
    LaneRuns<V> lanes;
    PanelOfWords<V> panel;
    for (int64_t first = 0; first < numbers_.pieces(); first += together) {
      for (int64_t p = 0; p < panels; ++p) {
        panel.number = panel.runs = 0;
        const int64_t row = n + p * kRows, here = smaller(kRows, count - p * kRows);
        piece.ahead = numbers_.ahead(p, panels, together);
        for (int64_t i = first; i < smaller(first + together, numbers_.pieces()); ++i) {
          if (fours_.apart() != 0) {
            fours_.append(i, row, here, piece.ahead, lanes, panel);
            continue;
          }
          numbers_.unpack(i, row, here, piece);
          words_.append(piece, i * numbers_.codes(), panel);
        }
        const int64_t k = first * numbers_.codes();
        w_.offset == Offset::kMinimum ? multiply<true>(panel, k, sums + p * each)
                                      : multiply<false>(panel, k, sums + p * each);
        if (x_.outliers != nullptr) add_outliers(panel, k, sums + p * each);
      }
      all.reach((first + together) * numbers_.codes());
    }
    all.finish();
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t m = 0; m < x_.rows; ++m)
        write(m, n + p * kRows, smaller(kRows, count - p * kRows),
              sums + p * each + m * kRows);
  }

 private:
  // Returns how many products of a word and a point fit in 32 bits, in whole pairs.
  static int64_t codes_in_a_sum(const Blocks& w) {
    float most = 255;
    if (w.point_type == PointType::kTable) {
      most = 1;
      for (int i = 0; i < 256; ++i)
        most = __builtin_fmaxf(most, __builtin_fabsf(w.points[i]));
    }
    return larger(2, static_cast<int64_t>(65538 / most) / 2 * 2);
  }

  // Writes the results of row `m` of inputs and `count` rows of the weight from row
  // `n`.
  void write(int64_t m, int64_t n, int64_t count, const float* sums) const {
    typename V::Floats row[4], lane[4];
    for (int v = 0; v < 4; ++v)
      row[v] = V::mul(V::load(sums + v * W), V::all(x_.unit[m] * unit_));
    if (fours_.apart() != 0) {
      for (int v = 0; v < 4; ++v) lane[v] = row[v];
      V::to_rows(lane, row);
    }
    for (int64_t v = 0; v < 4 && v * W < count; ++v)
      V::store(y_ + m * w_.n + n + v * W, row[v], smaller(W, count - v * W));
  }

  template <bool minima>
  void multiply(const PanelOfWords<V>& panel, int64_t k, float* sums) const {
    in_few_rows<V>(x_.rows, [&](auto number, int64_t m) EQQUANT_INLINE {
      multiply<decltype(number)::value, minima>(panel, m, k, sums + m * kRows);
    });
  }

  // Adds the products of `R` rows of inputs, from row `m` and position `k` on.
  template <int R, bool minima>
  EQQUANT_INNERMOST void multiply(const PanelOfWords<V>& panel, int64_t m, int64_t k,
                                  float* sums) const {
    const int16_t* const x = x_.word + m * x_.stride + k;
    for (int64_t i = 0; i < panel.runs; ++i) {
      const Run run = panel.run[i];
      int64_t first = run.first;
      for (; first + summed_ < run.last; first += summed_)
        add<R, false>(panel, i, first, first + summed_, x, nullptr, sums);
      float inputs[R];
      if constexpr (minima) sum_up<R>({k + run.first, k + run.last}, m, inputs);
      add<R, minima>(panel, i, first, run.last, x, inputs, sums);
    }
  }

  // Returns the sums of the words of a run.
  template <int R>
  void sum_up(Run run, int64_t m, float* inputs) const {
    const int64_t groups = divided_up(x_.stride, kRun);
    const float* const sums = x_.sums + m * groups;
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) inputs[r] = sums[r * groups + run.first / kRun];
    for (int64_t g = run.first / kRun + 1; g * kRun < run.last; ++g) {
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) inputs[r] += sums[r * groups + g];
    }
  }

  // Adds the scaled sum of some codes of run `i`; with `minima`, also their share of
  // the minimum.
  template <int R, bool minima>
  void add(const PanelOfWords<V>& panel, int64_t i, int64_t first, int64_t last,
           const int16_t* x, const float* inputs, float* sums) const {
    Ints sum[R][4];
    dot_words<V>(panel.pairs + first / 2 * kRows, last - first, x + first, x_.stride,
                 sum);
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      const auto scale = V::load(panel.scale + i * kRows + v * W);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_ADDED_UP(sum[r][v]);
        float* const to = sums + r * kRows + v * W;
        auto total = V::fma(V::to_floats(sum[r][v]), scale, V::load(to));
        if constexpr (minima)
          total = V::fma(V::load(panel.rest + i * kRows + v * W), V::all(inputs[r]),
                         total);
        V::store(to, total);
      }
    }
  }

  // Adds the products of the outliers with a panel, from position `k` on.
  void add_outliers(const PanelOfWords<V>& panel, int64_t k, float* sums) const {
    over_outliers(x_, k, k + panel.number, [&](int64_t m, const Outlier& one) {
      add_outlier(panel, one.k - k, one.x, sums + m * kRows);
    });
  }

  EQQUANT_INNERMOST void add_outlier(const PanelOfWords<V>& panel, int64_t k, float x,
                                     float* sums) const {
    if (const int64_t apart = fours_.apart(); apart != 0) {
      const int64_t group = k / (4 * apart) * (4 * apart);
      int64_t to = group;
      while (word_of_fours(to, apart) != k) ++to;
      k = to;
    }
    int64_t i = 0;
    while (panel.run[i].last <= k) ++i;
    for (int v = 0; v < 4; ++v) {
      const int64_t at = i * kRows + v * W;
      const auto one =
          one_of_pairs<V>(panel.pairs + k / 2 * kRows + v * W, k % 2 != 0);
      auto number = V::mul(one, V::load(panel.scale + at));
      if (w_.offset == Offset::kMinimum)
        number = V::add(number, V::load(panel.rest + at));
      V::store(sums + v * W, V::fma(number, V::all(x), V::load(sums + v * W)));
    }
  }

  const Blocks& w_;
  const Words& x_;
  Numbers<V> numbers_;
  WordsOfPieces<V> words_;
  WordsOfFours<V> fours_;
  int64_t summed_;
  float unit_;
  float* y_;
};

template <class V>
int64_t int16_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  const int64_t together =
      decoded_panels<V>(w, rows, workers) * DecodedIntegers<V>::kRows;
  return smaller(workers, divided_up(w.n, together)) *
         LongSums<V>::floats(rows * together, w.k);
}

template <class V>
void int16(const Blocks& w, const Words& x, float unit, float* y, float* scratch,
           const Parallel& parallel) {
  const int64_t together =
      decoded_panels<V>(w, x.rows, parallel.workers) * DecodedIntegers<V>::kRows;
  const int64_t mine = LongSums<V>::floats(x.rows * together, w.k);
  const DecodedIntegers<V> product(w, x, unit, y);
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together;
    in_turns(w, n, smaller(together, w.n - n), [&](int64_t first, int64_t number) {
      product.columns(first, number, scratch + worker * mine);
    });
  });
}

template <class V>
constexpr void add_int16(Kernels& found) {
  found.to_words = to_words<V>;
  found.int16_scratch = int16_scratch<V>;
  found.int16 = int16<V>;
}

}  // namespace
}  // namespace eqquant
