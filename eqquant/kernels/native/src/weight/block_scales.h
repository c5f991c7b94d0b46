// The parameters of the runs of a panel's codes, in the order of lanes of
// `weight/panel.h`.
#pragma once

#include <cstdint>

#include "weight/block_parts.h"
#include "weight/codebooks.h"
#include "weight/packing.h"
#include "weight/panel_reader.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// Bytes of the rows of a panel in the order of lanes.
template <class V>
struct Lanes : V::Bytes {};

template <class V, bool part>
struct Unit<Lanes<V>, part> {
  using B = typename V::Bytes;

  const uint8_t* at;
  int64_t stride;
  int64_t rows;
  int64_t ahead = kAhead;

  typename B::Vector operator[](int64_t i) const {
    return B::to_lanes(Unit<B, part>{at, stride, rows, ahead}[i]);
  }
};

// The scales of some runs, the numbers subtracted from their codes, and the rest of
// their minima: see `Numbers::set`. Without offsets, only the scales.
template <class V>
struct LaneRuns {
  using B = typename V::Bytes;
  using Floats = typename V::Floats;
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  int64_t number;
  Run run[kRuns];
  alignas(64) float scale[kRuns * kRows];
  alignas(64) float zero[kRuns * kRows];
  alignas(64) float rest[kRuns * kRows];

  // Sets the parameters of piece `i` of `count` rows from row `n`, whose unit of codes
  // is at `at`, and prefetches `ahead` bytes further.
  template <Packing packing>
  EQQUANT_INNERMOST void set(const Blocks& w, int64_t i, const uint8_t* at, int64_t n,
                             int64_t count, int64_t ahead) {
    using P = Packed<packing>;
    const int64_t first = i * P::kCodes, codes = smaller(P::kCodes, w.k - first);
    if constexpr (is_gguf(packing)) {
      number = divided_up(codes, P::kBlock);
      for (int64_t r = 0; r < number; ++r)
        run[r] = {r * P::kBlock, smaller((r + 1) * P::kBlock, codes)};
      if (count == kRows)
        set_small<packing>(Unit<Lanes<V>, false>{at, w.stride(), count, ahead},
                           i % P::kSlices);
      else
        set_small<packing>(Unit<Lanes<V>, true>{at, w.stride(), count}, i % P::kSlices);
    } else {
      number = 0;
      for (int64_t k = 0; k < codes; ++number) {
        const int64_t g = (first + k) / w.block;
        run[number] = {k, smaller((g + 1) * w.block - first, codes)};
        k = run[number].last;
        // (A long block has several pieces.)
        const bool same = number == 0 && g == first_block_ && n == first_row_;
        if (!same) set_block(w, g, n, count);
        if (number == 0) first_block_ = g, first_row_ = n;
      }
    }
  }

 private:
  // The block and the row of the first run.
  int64_t first_block_ = -1, first_row_ = -1;
  // For the unit of GGUF types at `unit_`: the scales of the scales and of the minima.
  const uint8_t* unit_ = nullptr;
  alignas(64) float step_[kRows];
  alignas(64) float lowest_[kRows];

  template <Packing packing, bool part>
  void set_small(const Unit<Lanes<V>, part>& unit, int64_t slice) {
    using S = Parts<packing>;
    constexpr bool low = S::kLow >= 0;
    Floats step[4], lowest[4];
    if (unit.at != unit_) {
      unit_ = unit.at;
      V::from_halves(unit[S::kStep], unit[S::kStep + 1], step);
      if constexpr (low) V::from_halves(unit[S::kLow], unit[S::kLow + 1], lowest);
      unrolled<4>([&](auto v) {
        V::store(step_ + v * W, step[v]);
        if constexpr (low) V::store(lowest_ + v * W, lowest[v]);
      });
    } else {
      unrolled<4>([&](auto v) {
        step[v] = V::load(step_ + v * W);
        if constexpr (low) lowest[v] = V::load(lowest_ + v * W);
      });
    }
    if constexpr (Packed<packing>::kSlices == 1) {
      for (int v = 0; v < 4; ++v) {
        V::store(scale + v * W, step[v]);
        if constexpr (low) set_minimum(v * W, step[v], lowest[v], 0, 31);
      }
    } else {
      S::each(unit, slice, [&](int64_t r, auto steps, auto lows) {
        Floats of_scale[4], of_minimum[4];
        floats<true>(steps, of_scale);
        if constexpr (low) floats<true>(lows, of_minimum);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          const int64_t at = r * kRows + v * W;
          of_scale[v] = V::mul(step[v], of_scale[v]);
          V::store(scale + at, of_scale[v]);
          if constexpr (low) {
            const auto minimum = V::fnma(lowest[v], of_minimum[v], V::zero());
            set_minimum(at, of_scale[v], minimum, 0, 31);
          }
        }
      });
    }
  }

  void set_block(const Blocks& w, int64_t g, int64_t n, int64_t count) {
    const int64_t at = number * kRows;
    const float base = static_cast<float>(w.base);
    Floats scales[4], minima[4], zeros[4];
    of_block(w.scales, g, n, count, scales);
    if (w.offset == Offset::kMinimum) of_block(w.minima, g, n, count, minima);
    if (w.offset == Offset::kZeroPoint) {
      const uint8_t* const points = w.zero_points + w.of_blocks.place(g, n);
      const bool all = count == kRows;
      const auto rows = all ? B::load(points) : B::load(points, count);
      floats<false>(B::to_lanes(rows), zeros);
    }
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      V::store(scale + at + v * W, scales[v]);
      if (w.offset == Offset::kZeroPoint)
        V::store(zero + at + v * W, V::add(zeros[v], V::all(base)));
      if (w.offset == Offset::kMinimum)
        set_minimum(at + v * W, scales[v], minima[v], base,
                    static_cast<float>((1 << static_cast<int>(w.packing)) - 1));
    }
  }

  static void of_block(const BlockFloats& from, int64_t g, int64_t n, int64_t count,
                       Floats* lanes) {
    if (count == kRows && !from.shared && bytes_of(from.scale_type) == 2)
      return V::halves_in_lanes(
          static_cast<const uint16_t*>(from.scale) + from.order.place(g, n),
          from.scale_type, lanes);
    Floats rows[4];
    for (int64_t v = 0; v < 4; ++v) {
      const int64_t here = larger(0, smaller(W, count - v * W));
      // (Zeros for missing rows, even of scales that all rows share.)
      rows[v] = V::only(V::scales(from, g, n + v * W, here), here);
    }
    V::to_lanes(rows, lanes);
  }

  // For codes up to `most`, where `base` stands for the minimum.
  void set_minimum(int64_t at, Floats scales, Floats minimum, float base, float most) {
    const auto steps = V::mul(minimum, V::about_reciprocal(scales));
    const auto nearest = V::rounded(V::sub(V::all(base), steps), most);
    V::store(zero + at, nearest);
    V::store(rest + at, V::fma(V::sub(nearest, V::all(base)), scales, minimum));
  }

  template <bool sign>
  static void floats(typename B::Vector bytes, Floats* found) {
    alignas(64) uint8_t some[kRows];
    B::store(some, bytes);
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) found[v] = V::to_floats(V::template bytes<sign>(some + v * W));
  }
};

}  // namespace
}  // namespace eqquant
