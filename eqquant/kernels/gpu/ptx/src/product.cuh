// y[m, n] = x[m, k] @ W[n, k].T for 1 to 64 rows of bfloat16 and a stored weight with
// the contracted axis last, on every NVIDIA GPU since Ampere.
//
// A warp multiplies 16 rows of the weight at a time (the operand of `mma.sync.m16n8k16`
// that has 16 rows) by groups of 8 rows of `x`. A step is the columns that the four
// lanes of a row load at once. It has one or more parts, each within a block of the
// weight, so the block's scale multiplies the sum of the part, and the weight is never
// rounded. (Only where blocks are too small, scales multiply the numbers.) The order of
// the columns does not matter, as long as it is the same in `x`: a lane multiplies the
// codes that it has loaded, and nothing moves between lanes.
#pragma once
#include "blocks.cuh"
#include "grid.cuh"

// A class `W` reads a weight: see `Grid` and `Blocks`.
template <class W_, int kGroups, int kWarps, int kAhead>
struct Product {
  using W = W_;
  using Loaded = typename W::Loaded;
  static constexpr int kStep = 4 * W::kColumns;
  // The products of a part of a step, each of 4 columns of a lane.
  static constexpr int kProducts = W::kColumns / 4 / W::kParts;

  // The addresses at which the lane reads the next group of steps of its two rows.
  struct Weight {
    typename W::From rows[2];
    int step;
  };

  ON_LANE static void load_group(Loaded (&to)[kAhead][2], int d, const Weight& w,
                                 const Sizes& s) {
    EACH for (int h = 0; h < 2; ++h)
      W::load_step(to[d][h], w.rows[h], w.step, d, kAhead, s);
  }

  ON_LANE static void next_group(Weight& w, const Sizes& s) {
    w.step += kAhead;
    EACH for (int h = 0; h < 2; ++h) W::advance(w.rows[h], kAhead, s);
  }

  ON_LANE static void add_step(float (*sums)[4], const Loaded (&loaded)[2],
                               const Word* table, Word (&largest)[2], const Vector* x,
                               const Vector* x_last, const Sizes& s) {
    constexpr float zeros[4] = {};
    // Sums of inputs are computed as products with ones.
    constexpr Word ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    typename W::Ready ready[2];
    EACH for (int h = 0; h < 2; ++h) ready[h] = W::ready(loaded[h], largest[h]);
    EACH for (int p = 0; p < W::kParts; ++p) {
      float part[kGroups][4], inputs[kGroups][4];
      EACH for (int i = 0; i < kProducts; ++i) {
        const int all = p * kProducts + i;
        Word a[4];
        EACH for (int j = 0; j < 4; ++j) {
          const int h = j % 2;
          a[j] = W::pair(loaded[h], ready[h], 2 * all + j / 2, table, largest[h]);
        }
        EACH for (int g = 0; g < kGroups; ++g) {
          const Vector of_x =
              load((g == kGroups - 1 ? x_last : x + g * s.columns) + all / 2);
          const Word b[2] = {of_x.words[all % 2 * 2], of_x.words[all % 2 * 2 + 1]};
          if constexpr (W::kScalesSums)
            multiply_add(part[g], a, b, i == 0 ? zeros : part[g]);
          else
            multiply_add(sums[g], a, b, sums[g]);
          if constexpr (W::kAddsInputs)
            multiply_add(inputs[g], ones, b, i == 0 ? zeros : inputs[g]);
        }
      }
      if constexpr (W::kScalesSums) {
        float scales[2], minima[2];
        EACH for (int h = 0; h < 2; ++h) {
          scales[h] = W::scale(loaded[h], ready[h], p);
          if constexpr (W::kAddsInputs)
            minima[h] = W::minimum(loaded[h], ready[h], p, scales[h]);
        }
        EACH for (int g = 0; g < kGroups; ++g)
          EACH for (int i = 0; i < 4; ++i) {
            sums[g][i] += part[g][i] * scales[i / 2];
            if constexpr (W::kAddsInputs) sums[g][i] += inputs[g][i] * minima[i / 2];
          }
      }
    }
  }

  // The products of a stack run side by side. Their operands are consecutive in memory.
  ON_LANE static void run(const unsigned char* codes, const typename W::Scale* scales,
                          const typename W::Shift* offsets, const Vector* x, float* y,
                          const Sizes& s) {
    constexpr int kShared = kWarps * kGroups * 128 > W::table_words
                                ? kWarps * kGroups * 128
                                : W::table_words;
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
    EACH for (int h = 0; h < 2; ++h) {
      // (Lanes beyond the last row read the last row again, and store nothing.)
      const int n = block_of_grid(0) * 16 + row + 8 * h;
      w.rows[h] = W::from(codes, scales, offsets, one, n < s.n ? n : s.n - 1, w.step, s);
    }
    // The row of `x` of this lane, in the first groups and in the last group. (Again,
    // lanes beyond the last row read it.)
    constexpr int before = (kGroups - 1) * 8;
    const int last_row = row < s.rows - before ? row + before : s.rows - 1;
    x += ((long long)w.step * kStep + quarter * W::kColumns) / 8;
    const long long first_of_x = one * s.rows * (s.columns / 8);
    const Vector* x_last = x + first_of_x + last_row * (s.columns / 8);
    x += first_of_x + row * (s.columns / 8);

    W::fill(shared);
    if constexpr (W::table_words > 0) meet();
    const Word* const table = shared + lane;

    float sums[kGroups][4] = {};
    Word largest[2] = {};
    Loaded ahead[kAhead][2];
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
      if constexpr (W::kHasNaN)
        if (of_any_of_four(not_a_number(largest[h])) != 0)
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
