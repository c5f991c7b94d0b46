// What belongs to the runs of a panel's codes, in the order of lanes of `panel.h`.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "numbers.h"
#include "packing.h"
#include "panel.h"
#include "parts.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

// Bytes of 64 rows in the order of lanes.
struct Lanes512 : Bytes512 {};

inline __m512i to_lanes(__m512i rows) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), rows);
}

template <bool part>
struct Unit<Lanes512, part> {
  const uint8_t* at;
  int64_t stride;
  int64_t rows;
  int64_t ahead = kAhead;

  __m512i operator[](int64_t i) const {
    return to_lanes(Unit<Bytes512, part>{at, stride, rows, ahead}[i]);
  }
};

// The scales of some runs, what is subtracted from their codes, and what is left of
// their minima then: see `Numbers::set`. Without offsets, the scales alone.
struct LaneRuns {
  using V = Avx512;
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  int64_t number;
  Run run[kRuns];
  alignas(64) float scale[kRuns * kRows];
  alignas(64) float zero[kRuns * kRows];
  alignas(64) float rest[kRuns * kRows];

  // Those of piece `i` of `count` rows from row `n`, with the unit of codes at `at`, and
  // the one to prefetch `ahead` bytes further.
  template <Packing packing>
  void set(const Blocks& w, int64_t i, const uint8_t* at, int64_t n, int64_t count,
           int64_t ahead) {
    using P = Packed<packing>;
    const int64_t first = i * P::kCodes, codes = smaller(P::kCodes, w.k - first);
    if constexpr (is_gguf(packing)) {
      number = divided_up(codes, P::kBlock);
      for (int64_t r = 0; r < number; ++r)
        run[r] = {r * P::kBlock, smaller((r + 1) * P::kBlock, codes)};
      if (count == kRows)
        set_small<packing>(Unit<Lanes512, false>{at, w.stride(), count, ahead},
                           i % P::kSlices);
      else
        set_small<packing>(Unit<Lanes512, true>{at, w.stride(), count}, i % P::kSlices);
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
  // Of the first run.
  int64_t first_block_ = -1, first_row_ = -1;
  // Of the unit of GGUF's types at `unit_`: the scales of the scales and of the minima.
  const uint8_t* unit_ = nullptr;
  alignas(64) float step_[kRows];
  alignas(64) float lowest_[kRows];

  template <Packing packing, bool part>
  void set_small(const Unit<Lanes512, part>& unit, int64_t slice) {
    using S = Parts<packing>;
    constexpr bool low = S::kLow >= 0;
    __m512 step[4], lowest[4];
    if (unit.at != unit_) {
      unit_ = unit.at;
      halves(unit[S::kStep], unit[S::kStep + 1], step);
      if constexpr (low) halves(unit[S::kLow], unit[S::kLow + 1], lowest);
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
      S::each(unit, slice, [&](int64_t r, __m512i steps, __m512i lows) {
        __m512 of_scale[4], of_minimum[4];
        floats<true>(steps, of_scale);
        if constexpr (low) floats<true>(lows, of_minimum);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          const int64_t at = r * kRows + v * W;
          of_scale[v] = V::mul(step[v], of_scale[v]);
          V::store(scale + at, of_scale[v]);
          if constexpr (low) {
            const auto minimum = _mm512_fnmadd_ps(lowest[v], of_minimum[v], V::zero());
            set_minimum(at, of_scale[v], minimum, 0, 31);
          }
        }
      });
    }
  }

  void set_block(const Blocks& w, int64_t g, int64_t n, int64_t count) {
    const int64_t at = number * kRows;
    const float base = static_cast<float>(w.base);
    __m512 scales[4], minima[4], zeros[4];
    of_block(w.scales, g, n, count, scales);
    if (w.offset == Offset::kMinimum) of_block(w.minima, g, n, count, minima);
    if (w.offset == Offset::kZeroPoint) {
      const uint8_t* const points = w.zero_points + w.of_blocks.place(g, n);
      const bool all = count == kRows;
      const auto rows = all ? Bytes512::load(points) : Bytes512::load(points, count);
      floats<false>(to_lanes(rows), zeros);
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
                       __m512* lanes) {
    if (count == kRows && !from.shared && bytes_of(from.scale_type) == 2)
      return of_halves(from, g, n, lanes);
    __m512 rows[4];
    for (int64_t v = 0; v < 4; ++v) {
      const int64_t here = larger(0, smaller(W, count - v * W));
      // (Zeros for missing rows, even of scales that all rows share.)
      rows[v] = V::only(V::scales(from, g, n + v * W, here), here);
    }
    Panel::exchange(rows, lanes);
  }

  // The same of numbers of 16 bits, of whole panels. Four of them, of adjacent rows,
  // are next to each other in lanes, too.
  static void of_halves(const BlockFloats& from, int64_t g, int64_t n, __m512* lanes) {
    const auto* const at =
        static_cast<const uint16_t*>(from.scale) + from.order.place(g, n);
    const __m512i first = _mm512_loadu_si512(at), last = _mm512_loadu_si512(at + 32);
    const auto floats = [&](__m256i half) {
      return from.scale_type == ScaleType::kFloat16
                 ? _mm512_cvtph_ps(half)
                 : _mm512_castsi512_ps(
                       _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    };
    const auto two = [&](__m512i fours, __m512* to) {
      const __m512i found = _mm512_permutex2var_epi64(first, fours, last);
      to[0] = floats(_mm512_castsi512_si256(found));
      to[1] = floats(_mm512_extracti64x4_epi64(found, 1));
    };
    two(_mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), lanes);
    two(_mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15), lanes + 2);
  }

  // Of codes up to `most`, of which `base` stands for the minimum.
  void set_minimum(int64_t at, __m512 scales, __m512 minimum, float base, float most) {
    const auto steps = V::mul(minimum, V::about_reciprocal(scales));
    const auto nearest = V::rounded(V::sub(V::all(base), steps), most);
    V::store(zero + at, nearest);
    V::store(rest + at, V::fma(V::sub(nearest, V::all(base)), scales, minimum));
  }

  template <bool sign>
  static void floats(__m512i bytes, __m512* found) {
    alignas(64) uint8_t some[kRows];
    Bytes512::store(some, bytes);
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) found[v] = V::to_floats(V::bytes<sign>(some + v * W));
  }

  // From the lower and the upper bytes of float16.
  static void halves(__m512i low, __m512i high, __m512* found) {
    const auto in_two = [&](__m256i l, __m256i h, __m512* to) {
      const __m512i half = _mm512_or_si512(
          _mm512_cvtepu8_epi16(l), _mm512_slli_epi16(_mm512_cvtepu8_epi16(h), 8));
      to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    };
    in_two(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high), found);
    in_two(_mm512_extracti64x4_epi64(low, 1), _mm512_extracti64x4_epi64(high, 1),
           found + 2);
  }
};

}  // namespace
}  // namespace eqquant
