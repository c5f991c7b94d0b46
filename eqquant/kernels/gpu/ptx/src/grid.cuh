// A weight whose codes, scales and offsets are stored apart.
#pragma once
#include "codes.cuh"
#include "copy.cuh"
#include "sizes.cuh"

// A lane reads `kBytes` of codes of a row in each step. If `kOwn` is zero, all four lanes
// of the row read the same block in a step, whose scale multiplies the sum of the step.
// Otherwise each lane reads `kOwn` whole blocks, whose scales multiply the numbers.
template <class Codes, class Scales, Offset kOffset, int kBytes, int kOwn>
struct Grid {
  static constexpr int kWords = (kBytes + 3) / 4;
  // The columns of a step in a lane, and the parts of a step that have their own scales.
  static constexpr int kColumns = kBytes * 8 / Codes::bits, kParts = 1;
  static constexpr int kStepBytes = 4 * kBytes;
  static constexpr bool kScalesNumbers = kOwn > 0;
  static constexpr bool kScalesSums = Scales::applied && !kScalesNumbers;
  // Minima multiply the sums of inputs.
  static constexpr bool kAddsInputs = kOffset == Offset::kMinimum;
  static constexpr bool kHasNaN =
      Codes::has_nan || (kScalesNumbers && Scales::has_nan);
  static constexpr int table_words = Codes::table_words;
  static_assert(!(kScalesNumbers && kAddsInputs));

  static constexpr bool kShifted = kOffset != Offset::kNone;
  static constexpr int kScales = kScalesNumbers ? kOwn : 1;
  using Scale = typename Scales::Stored;
  using Shift = typename Offsets<Scales, kOffset>::Stored;

  // What a lane has loaded of a row for a step.
  struct Loaded {
    Word codes[kWords], scales[kScales], offsets[kScales];
  };

  // The addresses at which a lane reads a row.
  struct From {
    const unsigned char* codes;
    const Scale* scales;
    const Shift* offsets;
  };

  ON_LANE static void fill(Word* table) { Codes::fill(table); }

  // Whether each step has scales of its own.
  ON_LANE static bool each(const Sizes& s) {
    return kScalesNumbers || s.steps_of_block == 1;
  }
  // The number of scales of a row in such a step.
  static constexpr int kOfStep = kScalesNumbers ? 4 * kOwn : 1;

  // The addresses from `step` on, in the row `at` of the product `one` of a stack.
  ON_LANE static From from(const unsigned char* codes, const Scale* scales,
                           const Shift* offsets, long long one, long long at, int step,
                           const Sizes& s) {
    const int quarter = lane_of_block() % 4;
    const long long of_row =
        one * (s.scales_of_row == 0 ? s.blocks : (long long)s.n * s.blocks) +
        at * s.scales_of_row + (each(s) ? step * kOfStep : 0) + quarter * kOwn;
    return {codes + (one * s.n + at) * s.row_bytes +
                ((long long)step * kStepBytes + quarter * kBytes),
            scales + of_row, offsets + of_row};
  }

  ON_LANE static void advance(From& w, int steps, const Sizes& s) {
    w.codes += steps * kStepBytes;
    if (!Scales::applied || !each(s)) return;
    w.scales += steps * kOfStep;
    if (kShifted) w.offsets += steps * kOfStep;
  }

  // Loads the step `d` of a group of `ahead` steps that begins at `step`.
  ON_LANE static void load_step(Loaded& to, const From& w, int step, int d, int ahead,
                                const Sizes& s) {
    // (Sizes are constants, so the compiler knows whether rows are whole groups.)
    const int quarter = lane_of_block() % 4;
    const int at = (step + d) * kStepBytes + quarter * kBytes;
    if (s.row_bytes % (ahead * kStepBytes) == 0 || at < s.row_bytes) {
      if constexpr (kBytes == aligned(kBytes))
        load_once<kBytes>(to.codes, w.codes + d * kStepBytes);
      else
        copy<kBytes, aligned(kBytes)>(to.codes, w.codes + d * kStepBytes);
    } else {
      EACH for (int i = 0; i < kWords; ++i) to.codes[i] = 0;
    }
    if constexpr (Scales::applied) {
      const bool whole = each(s) ? s.blocks % (ahead * kOfStep) == 0
                                 : s.row_bytes % (ahead * kStepBytes) == 0;
      const int first = each(s) ? (step + d) * kOfStep + quarter * kOwn
                                : (step + d) / s.steps_of_block;
      EACH for (int i = 0; i < kScales; ++i) {
        // (After the last block, `x` is zero, but zero times a scale of NaN is NaN.)
        to.scales[i] = 0;
        to.offsets[i] = 0;
        if (whole || first + i < s.blocks) {
          const int block = each(s) ? d * kOfStep + i : first;
          to.scales[i] = load(w.scales + block);
          if constexpr (kShifted) to.offsets[i] = load(w.offsets + block);
        }
      }
    }
  }

  // What all numbers of a step need.
  struct Ready {
    Word added[kScales], scales[kScales];
  };

  ON_LANE static Ready ready(const Loaded& loaded, Word& largest) {
    Ready r;
    EACH for (int i = 0; i < kScales; ++i) {
      r.added[i] = Codes::added(
          kOffset == Offset::kZeroPoint ? loaded.offsets[i] : Codes::zero);
      if constexpr (kScalesNumbers)
        r.scales[i] = pair_of<Scales>(loaded.scales[i], largest);
    }
    return r;
  }

  // The pair `i` of a step.
  ON_LANE static Word pair(const Loaded& loaded, const Ready& r, int i,
                           const Word* table, Word& largest) {
    const int own = i * kScales / (kColumns / 2);
    const Word found = Codes::template pair<kOffset>(loaded.codes, i, table,
                                                     r.added[own], largest);
    return kScalesNumbers ? multiply_pair(found, r.scales[own]) : found;
  }

  // The scale of the sum of a part. (An infinite scale becomes NaN, since it multiplies
  // numbers of both signs.)
  ON_LANE static float scale(const Loaded& loaded, const Ready&, int) {
    const float scale = Scales::number(loaded.scales[0]);
    return scale * 0 + scale;
  }

  // What multiplies the sum of the inputs of a part, given its scale.
  ON_LANE static float minimum(const Loaded& loaded, const Ready&, int, float scale) {
    const float low = Scales::number(loaded.offsets[0]);
    return low * 0 + (Codes::missing * scale + low);
  }
};
