// The scales and minima of the small blocks in a block of a GGUF type.
#pragma once

#include <cstdint>
#include <iterator>

#include "weight/packing.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// The places of the scales and minima of small blocks in a block of bytes:
//
// - `kStep`: the first byte of a float16: the scale, or the scale of the scales.
// - `kLow`: the first byte of the minimum, or of the scale of the minima. -1 if there
//     are none.
// - `each(unit, slice, found)` calls `found(j, steps, lows)` for each small block of a
//     slice: its scale and its minimum below zero as multiples of these, one signed
//     byte for each row. Without `each`, the float16s are scale and minimum.
template <class F>
struct PartsOfFields {
  static constexpr int kStep = F::kScale, kLow = F::kLow;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    constexpr int64_t number = F::kCodes / F::kBlock, kinds = std::size(F::kScales);
    for (int64_t j = 0; j < number; ++j) {
      const int64_t i = number * slice + j;
      unrolled<kinds>([&](auto kind) {
        constexpr gguf::Scales some = F::kScales[kind];
        const int64_t at = (i - some.first) / some.every;
        if constexpr (kinds > 1)
          if (i < some.first || (i - some.first) % some.every != 0 || at >= some.number)
            return;
        auto steps = bits<B, kind, false>(unit, at);
        if constexpr (F::kZero != 0) steps = B::minus(steps, B::all(F::kZero));
        found(j, steps, bits<B, kind, true>(unit, at));
      });
    }
  }

 private:
  template <class B, int kind, bool low, int p = 0, bool part>
  static typename B::Vector bits(const Unit<B, part>& unit, int64_t at) {
    constexpr gguf::Scales some = F::kScales[kind];
    constexpr gguf::ScaleBits from = low ? some.lows[p] : some.steps[p];
    if constexpr (from.number == 0) {
      return B::all(0);
    } else {
      const auto found =
          moved<B, from.start, from.number, from.at>(unit[from.first + from.next * at]);
      constexpr bool more = p == 0 && (low ? some.lows[1] : some.steps[1]).number > 0;
      if constexpr (!more) return found;
      else return B::either(found, bits<B, kind, low, 1>(unit, at));
    }
  }
};

template <Packing packing>
struct Parts : PartsOfFields<typename FieldsOf<packing>::type> {};

}  // namespace
}  // namespace eqquant
