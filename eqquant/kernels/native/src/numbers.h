// Reads a panel of a weight of `Blocks`: some numbers of a few adjacent rows. A lane is
// a row.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "codebooks.h"
#include "kernels.h"
#include "packing.h"
#include "parts.h"
#include "points.h"

namespace eqquant {
namespace {

// The largest number of codes of a row that are unpacked at a time, and the number of
// those that share a scale at least.
constexpr int64_t kPieceCodes = 160;
constexpr int64_t kRun = 16;
constexpr int64_t kRuns = kPieceCodes / kRun;

// Codes from `first` to `last` of a piece, which are of one block.
struct Run {
  int64_t first, last;
};

// A piece of a panel: some codes of each of its rows, those of position `k` at
// `at + k * stride`. For each run of them, and each row:
//
// - `zero`: the integer that was subtracted from codes, so that they are signed. 0 if
//   codes are as they were, and stand for points. (Of each 16 codes, not of each run.)
// - `less`: what is to be subtracted in addition, from wide integers.
// - `minimum`, and `rest`: the number that a code stands for which is `less` then.
template <class V>
struct Piece {
  static constexpr int64_t kRows = V::Bytes::lanes;

  int64_t number;  // how many codes a row has
  int64_t runs;
  Run run[kRuns];
  const uint8_t* at;
  int64_t stride;
  int64_t ahead = kAhead;  // of `Unit`
  alignas(64) uint8_t codes[kPieceCodes * kRows];
  alignas(64) uint8_t zero[kRuns * kRows];
  alignas(64) float scale[kRuns * kRows];
  alignas(64) float less[kRuns * kRows];
  alignas(64) float minimum[kRuns * kRows];
  alignas(64) float rest[kRuns * kRows];
};

template <class V>
class Numbers {
 public:
  using B = typename V::Bytes;
  static constexpr int64_t kRows = Piece<V>::kRows, W = V::width;
  static_assert(kRows == 4 * W);

  explicit Numbers(const Blocks& w) : w_(w) {
    with_packing(w.packing, [&](auto packing) {
      constexpr Packing p = decltype(packing)::value;
      unpack_ = &Numbers::unpack_as<p>;
      read_runs_ = &Numbers::read_runs_as<p>;
      codes_ = Packed<p>::kCodes;
      slices_ = Packed<p>::kSlices;
      bytes_ = Packed<p>::kBytes;
      digit_ = Packed<p>::kDigit;
    });
  }

  // Calls `f` with the packing as a compile-time constant.
  template <class F>
  static void with_packing(Packing packing, F f) {
    switch (packing) {
#define EQQUANT_PACKING(name) \
  case Packing::name: return f(std::integral_constant<Packing, Packing::name>());
      EQQUANT_PACKING(kTrits)
      EQQUANT_PACKING(kBits1)
      EQQUANT_PACKING(kBits2)
      EQQUANT_PACKING(kBits3)
      EQQUANT_PACKING(kBits4)
      EQQUANT_PACKING(kBits5)
      EQQUANT_PACKING(kBits6)
      EQQUANT_PACKING(kBits7)
      EQQUANT_PACKING(kBits8)
      EQQUANT_PACKING(kQ4_1)
      EQQUANT_PACKING(kQ5_0)
      EQQUANT_PACKING(kQ5_1)
      EQQUANT_PACKING(kQ2_K)
      EQQUANT_PACKING(kQ3_K)
      EQQUANT_PACKING(kQ4_K)
      EQQUANT_PACKING(kQ5_K)
      EQQUANT_PACKING(kQ6_K)
      EQQUANT_PACKING(kIQ2_XXS)
      EQQUANT_PACKING(kIQ2_XS)
      EQQUANT_PACKING(kIQ3_XXS)
      EQQUANT_PACKING(kIQ1_S)
      EQQUANT_PACKING(kIQ3_S)
      EQQUANT_PACKING(kIQ2_S)
      EQQUANT_PACKING(kIQ4_XS)
      EQQUANT_PACKING(kIQ1_M)
#undef EQQUANT_PACKING
    }
  }

  // The number of codes of a piece, but the last of a row.
  int64_t codes() const { return codes_; }
  int64_t pieces() const { return divided_up(w_.k, codes_); }
  // The number of pieces that have bytes in common.
  int64_t slices() const { return slices_; }

  // See `bytes_ahead`: where `pieces` pieces of each panel are read at a time.
  int64_t ahead(int64_t p, int64_t panels, int64_t pieces) const {
    const int64_t bytes = larger(1, pieces / slices_) * bytes_;
    return bytes_ahead(p, panels, kRows, bytes, w_);
  }

  // Unpacks piece `i` of `count` rows from row `n`.
  void unpack(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    piece.number = smaller(codes_, w_.k - i * codes_);
    (this->*unpack_)(i, n, count, piece);
  }

  // The number of bits of a code, if codes are digits of whole bytes; otherwise 0.
  int digit() const { return digit_; }

  // Reads what belongs to runs, but no codes, and returns the first byte of the codes.
  const uint8_t* read_runs(int64_t i, int64_t n, int64_t count, Piece<V>& piece,
                           Places& places) const {
    piece.number = smaller(codes_, w_.k - i * codes_);
    return (this->*read_runs_)(i, n, count, piece, places);
  }

  // Decodes the codes from `first` to `last` of a piece, both of which are even but for
  // the last of a row. Calls `put(k, a, b)` for each two of them, with the numbers of
  // code `k` and of the next: four vectors each, in float32, with the bits that
  // `AbstractFormat.decode` gives them. What follows the last code is zero.
  template <class Put>
  void decode(const Piece<V>& piece, int64_t first, int64_t last, Put put) const {
    with_points<V>(w_, [&](auto points) {
      using P = typename decltype(points)::type;
      w_.offset == Offset::kMinimum ? decode_as<P, true>(piece, first, last, put)
                                    : decode_as<P, false>(piece, first, last, put);
    });
  }

  // The same numbers in memory, those of a code `kRows` apart from those of the next.
  void decode(const Piece<V>& piece, int64_t first, int64_t last, float* found) const {
    using Floats = typename V::Floats;
    decode(piece, first, last, [&](int64_t k, const Floats* a, const Floats* b) {
      float* const to = found + (k - first) * kRows;
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) V::store(to + v * W, a[v]);
      if (k + 1 == last) return;
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) V::store(to + kRows + v * W, b[v]);
    });
  }

 private:
  template <Packing packing>
  void unpack_as(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    using P = Packed<packing>;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    piece.at = piece.codes;
    piece.stride = kRows;
    if (packing == Packing::kBits8 && count == kRows) {
      // Codes are bytes already.
      piece.at = at;
      piece.stride = w_.stride();
      for (int64_t k = 0; k < piece.number; ++k)
        _mm_prefetch(reinterpret_cast<const char*>(at + k * w_.stride() + piece.ahead),
                     _MM_HINT_T1);
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
  const uint8_t* read_runs_as(int64_t i, int64_t n, int64_t count, Piece<V>& piece,
                              Places& places) const {
    using P = Packed<packing>;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    if constexpr (P::kDigit != 0) places = P::places(i % P::kSlices);
    return at + places.first * w_.stride();
  }

  // Returns the first byte of the unit.
  template <Packing packing>
  const uint8_t* set_runs(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    using P = Packed<packing>;
    const uint8_t* const at = w_.at(i / P::kSlices * P::kBytes, n);
    if constexpr (is_gguf(packing))
      set_small_blocks<packing>(at, i % P::kSlices, count, piece);
    else set_blocks(i, n, count, piece);
    return at;
  }

  template <Packing packing>
  void set_small_blocks(const uint8_t* at, int64_t slice, int64_t count,
                        Piece<V>& piece) const {
    if (count == kRows)
      set_small_blocks<packing>(Unit<B, false>{at, w_.stride(), count, piece.ahead},
                                slice, piece);
    else set_small_blocks<packing>(Unit<B, true>{at, w_.stride(), count}, slice, piece);
  }

  template <Packing packing, bool part>
  void set_small_blocks(const Unit<B, part>& unit, int64_t slice,
                        Piece<V>& piece) const {
    using P = Packed<packing>;
    using S = Parts<packing>;
    const auto base = V::all(static_cast<float>(w_.base));
    typename V::Floats step[4], low[4];
    if constexpr (packing == Packing::kIQ1_M) {
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

  // The float16s of each row whose first byte is at `at`; zeros if that is negative.
  template <bool part>
  static void halves(const Unit<B, part>& unit, int64_t at, typename V::Floats* found) {
    alignas(64) uint8_t low[kRows] = {}, high[kRows] = {};
    if (at >= 0) {
      B::store(low, unit[at]);
      B::store(high, unit[at + 1]);
    }
    halves(low, high, found);
  }

  // From the lower and the upper byte of each.
  static void halves(const uint8_t* low, const uint8_t* high,
                     typename V::Floats* found) {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      found[v] = V::from_half(
          V::either(V::template bytes<false>(low + v * W),
                    V::template left<8>(V::template bytes<false>(high + v * W))));
  }

  void set_blocks(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    const int64_t start = i * codes_;
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

  // Sets what belongs to run `r` of the rows of vector `v`.
  //
  // With a minimum, numbers are written as `(code - zero) * scale + rest`, where `rest`
  // is at most about half of a step if the block has numbers of both signs: so that no
  // digits are lost in sums of either part alone.
  void set(Piece<V>& piece, int64_t r, int64_t v, Run run, typename V::Floats scale,
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

  template <class P, bool minima, class Put>
  void decode_as(const Piece<V>& piece, int64_t first, int64_t last, Put put) const {
    const P points(w_);
    for (int64_t r = 0; r < piece.runs; ++r) {
      const Run run = {larger(first, piece.run[r].first),
                       smaller(last, piece.run[r].last)};
      if (run.first < run.last) decode_run<P, minima>(points, piece, r, run, put);
    }
  }

  template <class P, bool minima, class Put>
  void decode_run(const P& points, const Piece<V>& piece, int64_t r, Run run,
                  Put put) const {
    typename V::Floats scale[4], less[4], minimum[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t at = r * kRows + v * W;
      scale[v] = V::load(piece.scale + at);
      less[v] = is_wide(w_) ? V::load(piece.less + at) : V::zero();
      if constexpr (minima) {
        minimum[v] = V::load(piece.minimum + at);
        // Of integers: the points, of codes as they were.
        const auto zero = V::to_floats(
            V::template bytes<false>(piece.zero + run.first / kRun * kRows + v * W));
        less[v] = V::sub(V::all(static_cast<float>(w_.base)), zero);
      }
    }
    const auto numbers = [&](int64_t k, typename V::Floats* found) {
      points(piece.at + k * piece.stride, less, found);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        if constexpr (P::kUnit != 1) found[v] = V::mul(found[v], V::all(P::kUnit));
        if constexpr (std::is_same_v<P, IntegerPoints<V>> && minima)
          found[v] = V::sub(found[v], less[v]);
        if constexpr (minima)
          // Rounded once, as XLA does. Where the two cancel, the rounding of the product
          // alone would be as large as the number.
          found[v] = V::fma(found[v], scale[v], minimum[v]);
        else
          found[v] = V::mul(found[v], scale[v]);
      }
    };
    typename V::Floats a[4], b[4];
    int64_t k = run.first;
    for (; k + 2 <= run.last; k += 2) {
      numbers(k, a);
      numbers(k + 1, b);
      put(k, a, b);
    }
    if (k == run.last) return;
    numbers(k, a);
    for (int v = 0; v < 4; ++v) b[v] = V::zero();
    put(k, a, b);
  }

  const Blocks& w_;
  int64_t codes_, slices_, bytes_;
  int digit_;
  const uint8_t* (Numbers::*read_runs_)(int64_t, int64_t, int64_t, Piece<V>&,
                                        Places&) const;
  void (Numbers::*unpack_)(int64_t, int64_t, int64_t, Piece<V>&) const;
};

}  // namespace
}  // namespace eqquant
