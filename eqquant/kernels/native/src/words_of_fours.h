// Makes 16-bit integers of codes that are unpacked four of a row at a time: the words
// of a lane are the first and the third code, and those of the next lane the others. So
// a lane of four bytes becomes two of words by two instructions.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "fours.h"
#include "kernels.h"
#include "lane_runs.h"
#include "numbers.h"
#include "packing.h"
#include "panel_of_words.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

// How far apart the four codes of a lane are in a row, if words of a weight are made of
// fours, and otherwise 0: lanes should not be of two blocks.
inline int64_t apart_in_words(const Blocks& w) {
  const bool integers = w.point_type == PointType::kIntegers;
  const bool points = w.point_type == PointType::kTable && has_few_points(w);
  if (!has_fours(w.packing) || (!integers && w.offset != Offset::kNone)) return 0;
  if (!integers && !points && w.point_type != PointType::kSigned) return 0;
  return whole_fours(w) ? apart_in_fours(w.packing) : 0;
}

// Where the words of 32 codes come from: the word `i` is of code `word_of_fours(i)`.
constexpr int64_t word_of_fours(int64_t i, int64_t apart) {
  constexpr int64_t code[4] = {0, 2, 1, 3};
  const int64_t group = i / (4 * apart) * (4 * apart);
  return group + (i - group) / 4 + code[i % 4] * apart;
}

// Brings the words of inputs into the order of those of codes. `stride` is a multiple
// of 32.
inline void order_as_words(int64_t apart, int16_t* word, int64_t stride) {
  alignas(64) int16_t from[32];
  for (int64_t i = 0; i < 32; ++i)
    from[i] = static_cast<int16_t>(word_of_fours(i, apart));
  const __m512i order = _mm512_load_si512(from);
  for (int64_t k = 0; k < stride; k += 32)
    _mm512_storeu_si512(
        word + k, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(word + k)));
}

// Appends words of pieces to panels. Lanes are in the order of `panel.h`.
class WordsOfFours {
 public:
  using V = Avx512;
  static constexpr int64_t kRows = PanelOfWords::kRows, W = V::width;

  // A point of the table is `unit` times as large.
  WordsOfFours(const Blocks& w, float unit)
      : w_(w), per_unit_(1 / unit), apart_(apart_in_words(w)), fours_(w) {
    if (apart_ == 0) return;
    Numbers<V>::with_packing(w.packing, [&](auto packing) {
      constexpr Packing p = decltype(packing)::value;
      if constexpr (has_fours(p)) {
        if (w.point_type == PointType::kSigned)
          append_ = &WordsOfFours::append_as<p, Kind::kSigned>;
        else if (w.point_type == PointType::kTable)
          append_ = &WordsOfFours::append_as<p, Kind::kTable>;
        else if (w.offset == Offset::kNone)
          append_ = &WordsOfFours::append_as<p, Kind::kLess>;
        else append_ = &WordsOfFours::append_as<p, Kind::kLessOfRun>;
      }
    });
    for (int i = 0; i < 32; ++i) table_[i] = static_cast<int16_t>(w.points[i % 16]);
  }

  int64_t apart() const { return apart_; }

  // Of piece `i` of `count` rows from row `n`. Sets `runs` to those of the piece. What
  // is read next is `ahead` bytes further.
  void append(int64_t i, int64_t n, int64_t count, int64_t ahead, LaneRuns& runs,
              PanelOfWords& panel) const {
    (this->*append_)(i, n, count, ahead, runs, panel);
  }

 private:
  // How codes become integers: as they are, with a sign; less what stands for zero, in
  // the weight or in their run; or by a table of 16.
  enum class Kind { kSigned, kLess, kLessOfRun, kTable };

  template <Packing packing, Kind kind>
  EQQUANT_INNERMOST void append_as(int64_t i, int64_t n, int64_t count, int64_t ahead,
                                   LaneRuns& runs, PanelOfWords& panel) const {
    using P = Packed<packing>;
    const uint8_t* const at = w_.at(i / P::kSlices * P::kBytes, n);
    const int64_t k = i * P::kCodes, number = smaller(P::kCodes, w_.k - k);
    const int64_t start = panel.number;
    runs.set<packing>(w_, i, at, n, count, ahead);
    // Of each 16 words.
    alignas(64) int32_t less[kind == Kind::kLessOfRun ? kRuns * kRows : 1];
    for (int64_t r = 0; r < runs.number; ++r) {
      const Run words = {runs.run[r].first, in_whole_fours(runs.run[r].last)};
      append_run(runs, r, words, k, panel);
      if constexpr (kind == Kind::kLessOfRun)
        for (int64_t first = words.first; first < words.last; first += kRun)
          for (int64_t v = 0; v < kRows; v += W)
            _mm512_store_si512(less + first / kRun * kRows + v,
                               twice(V::load(runs.zero + r * kRows + v)));
    }
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(w_.base));
    const __m512i table = _mm512_load_si512(table_);
    int32_t* const pairs = panel.pairs + start / 2 * kRows;
    fours_.each<packing>(
        i, at, count, number, ahead, [&](int64_t j, const Fours512::Vector& codes) {
          int32_t* const to = pairs + j / 2 * kRows;
          EQQUANT_UNROLL
          for (int v = 0; v < 4; ++v) {
            __m512i two[2];
            halves<kind>(codes.of[v], two);
            EQQUANT_UNROLL
            for (int h = 0; h < 2; ++h) {
              if constexpr (kind == Kind::kTable)
                two[h] = _mm512_permutexvar_epi16(two[h], table);
              if constexpr (kind == Kind::kLess)
                two[h] = _mm512_sub_epi16(two[h], base);
              if constexpr (kind == Kind::kLessOfRun)
                two[h] = _mm512_sub_epi16(
                    two[h], _mm512_load_si512(less + j / kRun * kRows + v * W));
              _mm512_store_si512(to + h * kRows + v * W, two[h]);
            }
          }
        });
    panel.number += in_whole_fours(number);
  }

  // (The words of the last codes of a row are anywhere among those of whole fours.)
  int64_t in_whole_fours(int64_t codes) const {
    return divided_up(codes, 4 * apart_) * (4 * apart_);
  }

  // What belongs to run `r` of the piece that begins at position `k` of the row. Its
  // `words` are counted from there.
  void append_run(const LaneRuns& runs, int64_t r, Run words, int64_t k,
                  PanelOfWords& panel) const {
    const int64_t start = panel.number;
    if (r == 0 && start > 0 && !is_gguf(w_.packing) && k % w_.block != 0) {
      // The rest of a block.
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

  // The words of four bytes: of the first and the third, and of the others.
  template <Kind kind>
  static void halves(__m512i bytes, __m512i* two) {
    if constexpr (kind == Kind::kSigned) {
      two[0] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
      two[1] = _mm512_srai_epi16(bytes, 8);
    } else {
      two[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff));
      two[1] = _mm512_srli_epi16(bytes, 8);
    }
  }

  // Each integer as both words of its lane.
  static __m512i twice(__m512 integers) {
    const __m512i one = _mm512_cvtps_epi32(integers);
    return _mm512_or_si512(_mm512_and_si512(one, _mm512_set1_epi32(0xffff)),
                           _mm512_slli_epi32(one, 16));
  }

  const Blocks& w_;
  float per_unit_;
  int64_t apart_;
  Fours<Unsigned::kAsTheyAre> fours_;
  void (WordsOfFours::*append_)(int64_t, int64_t, int64_t, int64_t, LaneRuns&,
                                PanelOfWords&) const = nullptr;
  alignas(64) int16_t table_[32];
};

}  // namespace
}  // namespace eqquant
