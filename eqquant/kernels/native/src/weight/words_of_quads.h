// Makes 16-bit integers of codes that are unpacked four of a row at a time: the words
// of a lane are the first and the third code, and the words of the next lane are the
// others. So two instructions turn a lane of four bytes into two lanes of words.
#pragma once

#include <cstdint>

#include "weight/block_scales.h"
#include "weight/packing.h"
#include "weight/panel_of_words.h"
#include "weight/panel_reader.h"
#include "weight/quads.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// Returns the distance in a row between the four codes of a lane, if the words of a
// weight are made of fours, and otherwise 0: lanes must be within one block.
inline int64_t apart_in_words(const Blocks& w) {
  const bool integers = w.point_type == PointType::kIntegers;
  const bool points = w.point_type == PointType::kTable && has_few_points(w);
  if (!has_fours(w.packing) || (!integers && w.offset != Offset::kNone)) return 0;
  if (!integers && !points && w.point_type != PointType::kSigned) return 0;
  return whole_fours(w) ? apart_in_fours(w.packing) : 0;
}

// Returns the code for word `i` of 32 codes.
constexpr int64_t word_of_fours(int64_t i, int64_t apart) {
  constexpr int64_t code[4] = {0, 2, 1, 3};
  const int64_t group = i / (4 * apart) * (4 * apart);
  return group + (i - group) / 4 + code[i % 4] * apart;
}

// Permutes the words of inputs to the order of the words of codes. `stride` is a
// multiple of 32.
template <int apart>
void order_as_words(int16_t* word, int64_t stride) {
  for (int64_t k = 0; k < stride; k += 4 * apart, word += 4 * apart) {
    int16_t some[4 * apart];
    for (int i = 0; i < 4 * apart; ++i) some[i] = word[word_of_fours(i, apart)];
    __builtin_memcpy(word, some, sizeof some);
  }
}

inline void order_as_words(int64_t apart, int16_t* word, int64_t stride) {
  switch (apart) {
    case 1: return order_as_words<1>(word, stride);
    case 2: return order_as_words<2>(word, stride);
    case 4: return order_as_words<4>(word, stride);
    case 8: return order_as_words<8>(word, stride);
  }
}

// Appends words of pieces to panels. Lanes are in the order of `weight/panel.h`.
template <class V>
class WordsOfFours {
 public:
  using Ints = typename V::Ints;
  static constexpr int64_t kRows = PanelOfWords<V>::kRows, W = V::width;

  // The points of the table are scaled by `unit`.
  WordsOfFours(const Blocks& w, float unit)
      : w_(w), per_unit_(1 / unit), apart_(apart_in_words(w)), fours_(w), table_(w.points) {
    if (apart_ == 0) return;
    Numbers<V>::with_packing(w.packing, [&](auto packing) {
      with_offset(w.offset, [&](auto offset) {
        constexpr Packing p = decltype(packing)::value;
        constexpr Offset o = decltype(offset)::value;
        if constexpr (has_fours<p>(PointType::kIntegers, o))
          append_ = &WordsOfFours::append_as<p, o == Offset::kNone ? Kind::kLess
                                                                  : Kind::kLessOfRun>;
        if constexpr (has_fours<p>(PointType::kSigned, o))
          if (w.point_type == PointType::kSigned)
            append_ = &WordsOfFours::append_as<p, Kind::kSigned>;
        if constexpr (has_fours<p>(PointType::kTable, o))
          if (w.point_type == PointType::kTable)
            append_ = &WordsOfFours::append_as<p, Kind::kTable>;
      });
    });
  }

  int64_t apart() const { return apart_; }

  // Appends piece `i` of `count` rows from row `n`, and sets `runs` to the runs of the
  // piece. Prefetches `ahead` bytes further.
  void append(int64_t i, int64_t n, int64_t count, int64_t ahead, LaneRuns<V>& runs,
              PanelOfWords<V>& panel) const {
    (this->*append_)(i, n, count, ahead, runs, panel);
  }

 private:
  // How codes become integers: unchanged, if they are signed; less the code of zero, of
  // the weight or of their run; or by a table of 16.
  enum class Kind { kSigned, kLess, kLessOfRun, kTable };

  template <Packing packing, Kind kind>
  EQQUANT_INNERMOST EQQUANT_FLAT void append_as(int64_t i, int64_t n, int64_t count,
                                                int64_t ahead, LaneRuns<V>& runs,
                                                PanelOfWords<V>& panel) const {
    using P = Packed<packing>;
    const uint8_t* const at = w_.at(i / P::kSlices * P::kBytes, n);
    const int64_t k = i * P::kCodes, number = smaller(P::kCodes, w_.k - k);
    const int64_t start = panel.number;
    runs.template set<packing>(w_, i, at, n, count, ahead);
    // One number for each 16 words.
    alignas(64) int32_t less[kind == Kind::kLessOfRun ? kRuns * kRows : 1];
    for (int64_t r = 0; r < runs.number; ++r) {
      const Run words = {runs.run[r].first, in_whole_fours(runs.run[r].last)};
      append_run(runs, r, words, k, panel);
      if constexpr (kind == Kind::kLessOfRun)
        for (int64_t first = words.first; first < words.last; first += kRun)
          for (int64_t v = 0; v < kRows; v += W)
            V::store(less + first / kRun * kRows + v,
                     twice(V::load(runs.zero + r * kRows + v)));
    }
    const Ints base = V::words(static_cast<int16_t>(w_.base));
    const auto table = table_;
    int32_t* const pairs = panel.pairs + start / 2 * kRows;
    fours_.template each<packing>(
        i, at, count, number, ahead, [&](int64_t j, const typename Quads<V>::Vector& codes) {
          int32_t* const to = pairs + j / 2 * kRows;
          EQQUANT_UNROLL
          for (int v = 0; v < 4; ++v) {
            Ints two[2];
            V::template to_words<kind == Kind::kSigned>(codes.of[v], two);
            EQQUANT_UNROLL
            for (int h = 0; h < 2; ++h) {
              if constexpr (kind == Kind::kTable) two[h] = table[two[h]];
              if constexpr (kind == Kind::kLess)
                two[h] = V::minus_words(two[h], base);
              if constexpr (kind == Kind::kLessOfRun)
                two[h] = V::minus_words(two[h],
                                        V::load(less + j / kRun * kRows + v * W));
              V::store(to + h * kRows + v * W, two[h]);
            }
          }
        });
    panel.number += in_whole_fours(number);
  }

  // (The words of the last codes of a row may be anywhere among the words of whole
  // fours.)
  int64_t in_whole_fours(int64_t codes) const {
    return divided_up(codes, 4 * apart_) * (4 * apart_);
  }

  // Appends the parameters of run `r` of the piece that begins at position `k` of the
  // row. Its `words` are counted from there.
  void append_run(const LaneRuns<V>& runs, int64_t r, Run words, int64_t k,
                  PanelOfWords<V>& panel) const {
    const int64_t start = panel.number;
    if (r == 0 && start > 0 && !is_gguf(w_.packing) && k % w_.block != 0) {
      // This continues a block.
      panel.run[panel.runs - 1].last = start + words.last;
      return;
    }
    for (int64_t v = 0; v < kRows; v += W) {
      V::store(panel.scale + panel.runs * kRows + v,
               V::load(runs.scale + r * kRows + v));
      if (w_.offset == Offset::kMinimum)
        V::store(panel.rest + panel.runs * kRows + v,
                 V::mul(V::load(runs.rest + r * kRows + v), V::all(per_unit_)));
    }
    panel.run[panel.runs++] = {start + words.first, start + words.last};
  }

  // Returns each integer as both words of its lane.
  static Ints twice(typename V::Floats integers) {
    const Ints one = V::to_ints(integers);
    return V::side_by_side(one, one);
  }

  const Blocks& w_;
  float per_unit_;
  int64_t apart_;
  Fours<V, Unsigned::kAsTheyAre> fours_;
  typename V::WordTable table_;
  void (WordsOfFours::*append_)(int64_t, int64_t, int64_t, int64_t, LaneRuns<V>&,
                                PanelOfWords<V>&) const = nullptr;
};

}  // namespace
}  // namespace eqquant
