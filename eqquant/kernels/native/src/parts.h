// The scales and minima of the small blocks that a block of GGUF's types consists of.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "packing.h"

namespace eqquant {
namespace {

// Where the parts of a block of bytes are, of which the small blocks' scales and minima
// consist:
//
// - `kStep`: the first byte of a float16, the scale or that of the scales.
// - `kLow`: that of the minimum, or of the scale of the minima. -1 if there are none.
// - `each(unit, slice, found)` calls `found(j, steps, lows)` for each small block of a
//   slice: how many such steps its scale is, and its minimum below zero, one byte with
//   a sign for each row. Where there is no `each`, the float16s are scale and minimum.
template <Packing packing>
struct Parts;

template <>
struct Parts<Packing::kQ4_1> {
  static constexpr int kStep = 0, kLow = 2;
};
template <>
struct Parts<Packing::kQ5_0> {
  static constexpr int kStep = 0, kLow = -1;
};
template <>
struct Parts<Packing::kQ5_1> {
  static constexpr int kStep = 0, kLow = 2;
};

template <>
struct Parts<Packing::kQ2_K> {
  static constexpr int kStep = 80, kLow = 82;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    for (int64_t j = 0; j < 8; ++j) {
      const auto both = unit[8 * slice + j];
      found(j, moved<B, 0, 4>(both), moved<B, 4, 4>(both));
    }
  }
};

template <>
struct Parts<Packing::kQ3_K> {
  static constexpr int kStep = 108, kLow = -1;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    unrolled<16>([&](auto i) {
      if (i / 8 != slice) return;
      const auto low = moved<B, i / 8 * 4, 4>(unit[96 + i % 8]);
      const auto high = moved<B, i / 4 * 2, 2, 4>(unit[104 + i % 4]);
      found(i % 8, B::minus(B::either(low, high), B::all(32)), B::all(0));
    });
  }
};

template <>
struct Parts<Packing::kQ6_K> {
  static constexpr int kStep = 208, kLow = -1;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    for (int64_t j = 0; j < 8; ++j) found(j, unit[192 + 8 * slice + j], B::all(0));
  }
};

template <>
struct Parts<Packing::kIQ4_XS> {
  static constexpr int kStep = 0, kLow = -1;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    unrolled<8>([&](auto i) {
      if (i != slice) return;
      const auto low = moved<B, i % 2 * 4, 4>(unit[4 + i / 2]);
      const auto high = moved<B, i % 4 * 2, 2, 4>(unit[2 + i / 4]);
      found(0, B::minus(B::either(low, high), B::all(32)), B::all(0));
    });
  }
};

// Of eight scales and eight minima, the first four of each are six bits of a byte,
// above which are two bits of the others.
struct SixBitParts {
  static constexpr int kStep = 0, kLow = 2;

  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t at = 4 + (2 * slice + i) % 4;
      const auto scales = unit[at], minima = unit[at + 4];
      if (slice < 2) {
        found(i, moved<B, 0, 6>(scales), moved<B, 0, 6>(minima));
        continue;
      }
      const auto low = unit[at + 8];
      found(i, B::either(moved<B, 0, 4>(low), moved<B, 6, 2, 4>(scales)),
            B::either(moved<B, 4, 4>(low), moved<B, 6, 2, 4>(minima)));
    }
  }
};
template <>
struct Parts<Packing::kQ4_K> : SixBitParts {};
template <>
struct Parts<Packing::kQ5_K> : SixBitParts {};

}  // namespace
}  // namespace eqquant
