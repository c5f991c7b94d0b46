// y[m, n] = x[m, k] @ W[n, k].T for 1 to 64 rows of bfloat16 and a stored weight with
// the contracted axis last, on every NVIDIA GPU since Ampere.
//
// A warp multiplies 16 rows of the weight at a time (the operand of `mma.sync.m16n8k16`
// that has 16 rows) by groups of 8 rows of `x`. A step is the columns that the four
// lanes of a row load at once, `kBytes` each. All of them belong to one block of the
// weight, so its scale multiplies the sum of the step, and the weight is never rounded.
// The order of the columns does not matter, as long as it is the same in `x`: a lane
// multiplies the codes that it has loaded, and nothing moves between lanes.
#pragma once
#include "codes.cuh"
#include "scales.cuh"

// The sizes of a product.
// - `columns`: the number of columns of `x`, padded with zeros to whole groups of
//   steps.
// - `row_bytes`: the bytes of the codes of a row of the weight, a multiple of `kBytes`.
// - `steps`: the number of steps that have any codes.
// - `steps_of_block`: the number of steps that share a scale.
// - `blocks`: the number of scales of a row.
// - `scales_of_row`: the distance from the scales of a row to the scales of the next
//   row. Zero if all rows share their scales.
// - `splits`: the number of parts of the contracted axis. Their sums are written side
//   by side.
struct Sizes {
  int rows, n, columns, row_bytes, steps, steps_of_block, blocks, scales_of_row, splits;
};

template <class Codes, class Scales, Offset kOffset, int kBytes, int kGroups,
          int kWarps, int kAhead>
struct Product {
  static constexpr int kWords = kBytes / 4;
  // The columns of a step in one lane, and in all four lanes.
  static constexpr int kColumns = kBytes * 8 / Codes::bits;
  static constexpr int kStep = 4 * kColumns;
  static constexpr int kStepBytes = 4 * kBytes;
  static constexpr bool kScaled = Scales::applied;
  static constexpr bool kShifted = kOffset != Offset::kNone;
  using Scale = typename Scales::Stored;
  using Shift = typename Offsets<Scales, kOffset>::Stored;

  // The codes, scales and offsets of a step, for the two rows of a lane.
  struct Loaded {
    Word codes[2][kWords];
    Scale scales[2];
    Shift offsets[2];
  };

  // The addresses at which the lane reads the next group of steps of its two rows.
  struct Weight {
    const unsigned char* codes[2];
    const Scale* scales[2];
    const Shift* offsets[2];
    int step;
  };

  ON_LANE static void load_group(Loaded (&to)[kAhead], int d, const Weight& w,
                                 const Sizes& s) {
    // (Sizes are constants, so the compiler knows whether rows are whole groups.)
    const bool whole = s.row_bytes % (kAhead * kStepBytes) == 0;
    const int quarter = lane_of_block() % 4;
    const int at = (w.step + d) * kStepBytes + quarter * kBytes;
    const bool each = s.steps_of_block == 1;
    EACH for (int h = 0; h < 2; ++h) {
      if (whole || at < s.row_bytes) {
        load_once<kBytes>(to[d].codes[h], w.codes[h] + d * kStepBytes);
      } else {
        EACH for (int i = 0; i < kWords; ++i) to[d].codes[h][i] = 0;
      }
      if constexpr (kScaled) {
        // (After the last step, `x` is zero, but zero times a scale of NaN is NaN.)
        const int block = each ? d : (w.step + d) / s.steps_of_block;
        to[d].scales[h] = 0;
        to[d].offsets[h] = 0;
        if (whole || w.step + d < s.steps) {
          to[d].scales[h] = load(w.scales[h] + block);
          if constexpr (kShifted) to[d].offsets[h] = load(w.offsets[h] + block);
        }
      }
    }
  }

  ON_LANE static void next_group(Weight& w, const Sizes& s) {
    w.step += kAhead;
    EACH for (int h = 0; h < 2; ++h) {
      w.codes[h] += kAhead * kStepBytes;
      if (kScaled && s.steps_of_block == 1) {
        w.scales[h] += kAhead;
        if (kShifted) w.offsets[h] += kAhead;
      }
    }
  }

  ON_LANE static void add_step(float (*sums)[4], const Loaded& loaded, const Word* table,
                               Word (&largest)[2], const Vector* x, const Vector* x_last,
                               const Sizes& s) {
    constexpr float zeros[4] = {};
    // Minima multiply the sums of inputs, which are computed as products with ones.
    constexpr bool has_zeros = kOffset == Offset::kZeroPoint;
    constexpr bool adds_inputs = kOffset == Offset::kMinimum;
    constexpr Word ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    float part[kGroups][4], inputs[kGroups][4];
    Word added[2];
    EACH for (int h = 0; h < 2; ++h)
      added[h] = Codes::added(has_zeros ? Word(loaded.offsets[h]) : Codes::zero);
    EACH for (int i = 0; i < kWords; ++i) {
      Word pairs[2][Codes::pairs];
      EACH for (int h = 0; h < 2; ++h)
        Codes::template decode<has_zeros>(loaded.codes[h][i], table, added[h],
                                          largest[h], pairs[h]);
      EACH for (int j = 0; j < Codes::pairs; j += 2) {
        const Word a[4] = {pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1]};
        const int word = i * Codes::pairs + j;
        EACH for (int g = 0; g < kGroups; ++g) {
          const Vector of_x =
              load((g == kGroups - 1 ? x_last : x + g * s.columns) + word / 4);
          const Word b[2] = {of_x.words[word % 4], of_x.words[word % 4 + 1]};
          if constexpr (kScaled)
            multiply_add(part[g], a, b, word == 0 ? zeros : part[g]);
          else
            multiply_add(sums[g], a, b, sums[g]);
          if constexpr (adds_inputs)
            multiply_add(inputs[g], ones, b, word == 0 ? zeros : inputs[g]);
        }
      }
    }
    if constexpr (kScaled) {
      float scales[2], minima[2];
      EACH for (int h = 0; h < 2; ++h) {
        const float scale = Scales::number(loaded.scales[h]);
        // An infinite scale becomes NaN, since it multiplies numbers of both signs.
        scales[h] = scale * 0 + scale;
        if constexpr (adds_inputs) {
          const float low = Scales::number(loaded.offsets[h]);
          minima[h] = low * 0 + (Codes::missing * scales[h] + low);
        }
      }
      EACH for (int g = 0; g < kGroups; ++g)
        EACH for (int i = 0; i < 4; ++i) {
          sums[g][i] += part[g][i] * scales[i / 2];
          if constexpr (adds_inputs) sums[g][i] += inputs[g][i] * minima[i / 2];
        }
    }
  }

  // The products of a stack run side by side. Their operands are consecutive in memory.
  ON_LANE static void run(const unsigned char* codes, const Scale* scales,
                          const Shift* offsets, const Vector* x, float* y,
                          const Sizes& s) {
    constexpr int kShared = kWarps * kGroups * 128 > Codes::table_words
                                ? kWarps * kGroups * 128
                                : Codes::table_words;
    SHARED Word shared[kShared];
    const int lane = lane_of_block() % 32, warp = lane_of_block() / 32;
    const int row = lane / 4, quarter = lane % 4;
    const long long one = block_of_grid(2);

    const int groups = (s.steps + kAhead - 1) / kAhead;
    const int parts = s.splits * kWarps, part = block_of_grid(1) * kWarps + warp;
    const int first = (long long)groups * part / parts;
    const int last = (long long)groups * (part + 1) / parts;

    Weight w;
    w.step = first * kAhead;
    const long long scales_of_one =
        one * (s.scales_of_row == 0 ? s.blocks : (long long)s.n * s.blocks);
    const int first_scale = s.steps_of_block == 1 ? w.step : 0;
    EACH for (int h = 0; h < 2; ++h) {
      // (Lanes beyond the last row read the last row again, and store nothing.)
      const int n = block_of_grid(0) * 16 + row + 8 * h;
      const long long at = n < s.n ? n : s.n - 1;
      w.codes[h] = codes + (one * s.n + at) * s.row_bytes +
                   ((long long)w.step * kStepBytes + quarter * kBytes);
      const long long of_row = scales_of_one + at * s.scales_of_row + first_scale;
      w.scales[h] = scales + of_row;
      w.offsets[h] = offsets + of_row;
    }
    // The row of `x` of this lane, in the first groups and in the last group. (Again,
    // lanes beyond the last row read it.)
    constexpr int before = (kGroups - 1) * 8;
    const int last_row = row < s.rows - before ? row + before : s.rows - 1;
    x += ((long long)w.step * kStep + quarter * kColumns) / 8;
    const long long first_of_x = one * s.rows * (s.columns / 8);
    const Vector* x_last = x + first_of_x + last_row * (s.columns / 8);
    x += first_of_x + row * (s.columns / 8);

    Codes::fill(shared);
    if constexpr (Codes::table_words > 0) meet();
    const Word* const table = shared + lane;

    float sums[kGroups][4] = {};
    Word largest[2] = {};
    Loaded ahead[kAhead];
    if (first < last)
      EACH for (int d = 0; d < kAhead; ++d) load_group(ahead, d, w, s);
    ONE_BY_ONE for (int i = first; i < last; ++i) {
      next_group(w, s);
      EACH for (int d = 0; d < kAhead; ++d) {
        add_step(sums, ahead[d], table, largest, x + d * (kStep / 8),
                 x_last + d * (kStep / 8), s);
        if (i + 1 < last) load_group(ahead, d, w, s);
      }
      x += kAhead * (kStep / 8);
      x_last += kAhead * (kStep / 8);
    }

    // The sums of a row with a NaN among its weights are NaN.
    EACH for (int h = 0; h < 2; ++h)
      if constexpr (Codes::has_nan)
        if (of_any_of_four(Codes::not_numbers(largest[h])) != 0)
          EACH for (int g = 0; g < kGroups; ++g)
            sums[g][2 * h] = sums[g][2 * h + 1] = of_bits(0x7fc00000u);

    // Adds up the sums of all warps, in order.
    meet();
    float* const all = reinterpret_cast<float*>(shared);
    EACH for (int g = 0; g < kGroups; ++g)
      EACH for (int j = 0; j < 4; ++j)
        all[((warp * kGroups + g) * 4 + j) * 32 + lane] = sums[g][j];
    meet();
    y += (one * s.splits + block_of_grid(1)) * s.rows * s.n;
    for (int e = lane_of_block(); e < kGroups * 128; e += 32 * kWarps) {
      float sum = 0;
      EACH for (int v = 0; v < kWarps; ++v) sum += all[v * kGroups * 128 + e];
      const int l = e % 32, j = e / 32 % 4, g = e / 128;
      const int m = g * 8 + l % 4 * 2 + j % 2;
      const int n = block_of_grid(0) * 16 + l / 4 + j / 2 * 8;
      if (m < s.rows && n < s.n) store(y + (long long)m * s.n + n, sum);
    }
  }
};
