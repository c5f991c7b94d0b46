// Reads pieces of panels of each packing. Products of all weights use this, so it is
// compiled separately, once for each kind of vectors.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "weight/block_parts.h"
#include "weight/codebooks.h"
#include "weight/packing.h"
#include "weight/panel_reader.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

template <class V>
class Pieces {
 public:
  using B = typename V::Bytes;
  static constexpr int64_t kRows = B::lanes, W = V::width;
  using Piece = PieceOfRows<kRows>;

  explicit Pieces(const Blocks& w) : w_(w) {}

  template <Packing packing>
  void unpack(int64_t i, int64_t n, int64_t count, Piece& piece) const {
    using P = Packed<packing>;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    piece.at = piece.codes;
    piece.stride = kRows;
    if (packing == Packing::kBits8 && count == kRows) {
      // Codes are bytes already.
      piece.at = at;
      piece.stride = w_.stride();
      for (int64_t k = 0; k < piece.number; ++k)
        prefetch<2>(at + k * w_.stride() + piece.ahead);
      return;
    }
    const UnpackedCodes<B> found = {piece.codes, piece.zero, w_.codebook};
    const int64_t slice = i % P::kSlices;
    if (count == kRows)
      P::unpack(Unit<B, false>{at, w_.stride(), count, piece.ahead}, slice,
                piece.number, found);
    else P::unpack(Unit<B, true>{at, w_.stride(), count}, slice, piece.number, found);
  }

  template <Packing packing>
  const uint8_t* read_runs(int64_t i, int64_t n, int64_t count, Piece& piece,
                              Places& places) const {
    using P = Packed<packing>;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    if constexpr (P::kDigit != 0) places = P::places(i % P::kSlices);
    return at + places.first * w_.stride();
  }

 private:
  // Sets the runs, and returns the first byte of the unit.
  template <Packing packing>
  const uint8_t* set_runs(int64_t i, int64_t n, int64_t count, Piece& piece) const {
    using P = Packed<packing>;
    const uint8_t* const at = w_.at(i / P::kSlices * P::kBytes, n);
    if constexpr (is_gguf(packing))
      set_small_blocks<packing>(at, i % P::kSlices, count, piece);
    else set_blocks(i * P::kCodes, n, count, piece);
    return at;
  }

  template <Packing packing>
  void set_small_blocks(const uint8_t* at, int64_t slice, int64_t count,
                        Piece& piece) const {
    if (count == kRows)
      set_small_blocks<packing>(Unit<B, false>{at, w_.stride(), count, piece.ahead},
                                slice, piece);
    else set_small_blocks<packing>(Unit<B, true>{at, w_.stride(), count}, slice, piece);
  }

  template <Packing packing, bool part>
  void set_small_blocks(const Unit<B, part>& unit, int64_t slice,
                        Piece& piece) const {
    using P = Packed<packing>;
    using S = Parts<packing>;
    const auto base = V::all(static_cast<float>(w_.base));
    typename V::Floats step[4], low[4];
    if constexpr (S::kStep < 0) {
      alignas(64) uint8_t first[kRows], last[kRows];
      S::step_bytes(unit, first, last);
      halves(first, last, step);
    } else {
      halves(unit, S::kStep, step);
    }
    if constexpr (unit_of(packing) != 1) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) step[v] = V::mul(step[v], V::all(unit_of(packing)));
    }
    halves(unit, S::kLow, low);
    const auto set_run = [&](int64_t r, int v, auto scale, auto minimum) {
      set(piece, r, v, {r * P::kBlock, (r + 1) * P::kBlock}, scale, base, minimum);
    };
    if constexpr (P::kSlices == 1) {
      for (int v = 0; v < 4; ++v) set_run(0, v, step[v], low[v]);
    } else {
      S::each(unit, slice, [&](int64_t r, auto steps, auto lows) {
        alignas(64) uint8_t scales[kRows], minima[kRows];
        B::store(scales, steps);
        B::store(minima, lows);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          const auto scale = V::to_floats(V::template bytes<true>(scales + v * W));
          const auto minimum = V::to_floats(V::template bytes<true>(minima + v * W));
          set_run(r, v, V::mul(step[v], scale),
                  V::sub(V::zero(), V::mul(low[v], minimum)));
        }
      });
    }
    piece.runs = divided_up(piece.number, P::kBlock);
    for (int64_t r = 0; r < piece.runs; ++r)
      piece.run[r] = {r * P::kBlock, smaller((r + 1) * P::kBlock, piece.number)};
  }

  // Loads the float16s of each row whose first byte is at `at`; zeros if that is
  // negative.
  template <bool part>
  static void halves(const Unit<B, part>& unit, int64_t at, typename V::Floats* found) {
    alignas(64) uint8_t low[kRows] = {}, high[kRows] = {};
    if (at >= 0) {
      B::store(low, unit[at]);
      B::store(high, unit[at + 1]);
    }
    halves(low, high, found);
  }

  // Converts the lower and the upper byte of each.
  static void halves(const uint8_t* low, const uint8_t* high,
                     typename V::Floats* found) {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      found[v] = V::from_half(
          V::either(V::template bytes<false>(low + v * W),
                    V::template left<8>(V::template bytes<false>(high + v * W))));
  }

  EQQUANT_INNERMOST void set_blocks(int64_t start, int64_t n, int64_t count,
                                    Piece& piece) const {
    piece.runs = 0;
    for (int64_t k = 0; k < piece.number; ++piece.runs) {
      const int64_t g = (start + k) / w_.block, r = piece.runs;
      const int64_t end = smaller((g + 1) * w_.block - start, piece.number);
      for (int64_t v = 0; v < 4; ++v) {
        const int64_t here = larger(0, smaller(W, count - v * W)), at = n + v * W;
        auto zero = V::all(static_cast<float>(w_.base));
        if (w_.offset == Offset::kZeroPoint) {
          const auto* const points = w_.zero_points + w_.of_blocks.place(g, at);
          zero = V::add(zero, V::to_floats(V::template bytes<false>(points, here)));
        }
        // (Zeros for missing rows, even of scales that all rows share.)
        const auto of_rows = [&](const BlockFloats& floats) {
          return V::only(V::scales(floats, g, at, here), here);
        };
        const auto minimum =
            w_.offset == Offset::kMinimum ? of_rows(w_.minima) : V::zero();
        set(piece, r, v, {k, end}, of_rows(w_.scales), zero, minimum);
      }
      piece.run[r] = {k, end};
      k = end;
    }
  }

  // Sets the parameters of run `r` for the rows of vector `v`.
  //
  // With a minimum, numbers are written as `(code - zero) * scale + rest`, where `rest`
  // is at most about half of a step if the block has numbers of both signs. So the sums
  // of neither part alone lose digits.
  void set(Piece& piece, int64_t r, int64_t v, Run run, typename V::Floats scale,
           typename V::Floats zero, typename V::Floats minimum) const {
    const int64_t at = r * kRows + v * W;
    V::store(piece.scale + at, scale);
    if (w_.offset == Offset::kMinimum) {
      int32_t bits = static_cast<int32_t>(w_.packing);
      if (is_gguf(w_.packing)) bits = 5;
      if (w_.packing == Packing::kTrits) bits = 2;
      const auto base = zero;
      const auto steps = V::mul(minimum, V::about_reciprocal(scale));
      zero = V::rounded(V::sub(base, steps), static_cast<float>((1 << bits) - 1));
      V::store(piece.minimum + at, minimum);
      V::store(piece.rest + at, V::fma(V::sub(zero, base), scale, minimum));
    }
    if (w_.point_type != PointType::kIntegers) {
      zero = V::zero();
    } else if (is_wide(w_)) {
      const bool eight = w_.packing == Packing::kBits8;
      const auto here = eight ? V::zero() : V::rounded(zero, 127);
      V::store(piece.less + at, V::sub(zero, here));
      zero = here;
    }
    for (int64_t k = run.first; k < run.last; k += kRun)
      V::store_bytes(piece.zero + k / kRun * kRows + v * W, zero);
  }

  const Blocks& w_;
};

template <class V, Packing packing, class P = Packed<packing>>
constexpr Reader<V::Bytes::lanes> kReader = {
    P::kCodes,
    P::kSlices,
    P::kBytes,
    P::kDigit,
    [](const Blocks& w, int64_t i, int64_t n, int64_t count, auto& piece) {
      Pieces<V>(w).template unpack<packing>(i, n, count, piece);
    },
    [](const Blocks& w, int64_t i, int64_t n, int64_t count, auto& piece, auto& places) {
      return Pieces<V>(w).template read_runs<packing>(i, n, count, piece, places);
    },
};

template <class V>
const Reader<V::Bytes::lanes>* find_reader(Packing packing) {
  const Reader<V::Bytes::lanes>* found = nullptr;
  Numbers<V>::with_packing(packing, [&](auto one) {
    found = &kReader<V, decltype(one)::value>;
  });
  return found;
}

// (This unit has no kernels of its own.)
template <class V>
constexpr void add_pieces(Kernels&) {}

}  // namespace

template <>
const Reader<EQQUANT_SET::Bytes::lanes>& reader_of<EQQUANT_SET::Bytes::lanes>(
    Packing packing) {
  return *find_reader<EQQUANT_SET>(packing);
}

}  // namespace eqquant
