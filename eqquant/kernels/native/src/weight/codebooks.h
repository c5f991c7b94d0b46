// The packing of codes in GGUF types with a codebook: indices of points, each with the
// levels of eight numbers, or of four. Codes become signed integers.
#pragma once

#include <cstdint>

#include "weight/block_parts.h"
#include "weight/packing.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// The two bytes of a point, for each row.
template <class B>
struct Point {
  typename B::Vector first, last;

  // Returns the point with the index `low + 256 * high`.
  static Point of(const uint16_t* codebook, typename B::Vector low,
                  typename B::Vector high) {
    alignas(64) uint8_t first[B::lanes], last[B::lanes];
    B::store(first, low);
    B::store(last, high);
    for (int64_t i = 0; i < B::lanes; ++i) {
      const uint16_t point = codebook[first[i] | last[i] << 8];
      first[i] = static_cast<uint8_t>(point);
      last[i] = static_cast<uint8_t>(point >> 8);
    }
    return {B::load(first), B::load(last)};
  }

  // Returns level `i`, which has `bits` bits.
  template <int bits, int i>
  typename B::Vector level() const {
    return moved<B, bits * i % 8, bits>(bits * i < 8 ? first : last);
  }
};

// Puts eight codes from position `k` on: `magnitude(j)`, with the sign that is bit `j`.
template <class B, class Magnitude>
void put_signed(const UnpackedCodes<B>& put, int64_t k, typename B::Vector signs,
                Magnitude magnitude) {
  unrolled<8>([&](auto j) {
    const auto negative = B::minus(B::all(0), moved<B, j, 1>(signs));
    put(k + j, B::minus(B::differing(magnitude(j), negative), negative));
  });
}

// Completes the signs of eight numbers from the first seven: an even number is
// negative.
template <class B>
typename B::Vector eight_signs(typename B::Vector seven) {
  auto odd = B::differing(seven, moved<B, 4, 4>(seven));
  odd = B::differing(odd, moved<B, 2, 2>(odd));
  odd = B::differing(odd, moved<B, 1, 1>(odd));
  return B::either(seven, moved<B, 0, 1, 7>(odd));
}

// Returns field `g` of four times seven bits of four bytes, `byte(0)` and so on.
template <class B, int g, class Byte>
typename B::Vector seven_bits(Byte byte) {
  const auto high = moved<B, 0, 7 - g, g>(byte(g));
  if constexpr (g == 0)
    return high;
  else
    return B::either(moved<B, 8 - g, g>(byte(g - 1)), high);
}

// Returns `2 x + 1`, for some bits of each byte.
template <class B, int from, int bits>
typename B::Vector odd(typename B::Vector c) {
  return B::either(moved<B, from, bits, 1>(c), B::all(1));
}

// Returns 8, 25 or 43, for level `j`.
template <class B, int j>
typename B::Vector of_iq2(const Point<B>& point) {
  const auto level = point.template level<2, j>();
  const auto twice = B::either(moved<B, 0, 2, 4>(level), moved<B, 1, 1>(level));
  return B::either(B::either(level, twice), B::all(8));
}

// Puts eight codes in eighths: a level, less one, and an eighth of either sign.
template <class B>
void put_eighths(const UnpackedCodes<B>& put, int64_t k, const Point<B>& point,
                 typename B::Vector negative) {
  const auto positive = B::minus(B::all(1), negative);
  const auto less = B::minus(B::all(9), moved<B, 0, 1, 1>(positive));
  unrolled<8>([&](auto j) {
    put(k + j, B::minus(moved<B, 0, 2, 3>(point.template level<2, j>()), less));
  });
}

// The common part of these packings: slices of 32 codes.
template <class F>
struct OfCodebook {
  static constexpr int kSlices = F::kSlices, kCodes = F::kCodes, kBytes = F::kBytes;
  static constexpr int kBlock = F::kBlock, kDigit = 0;
  static constexpr bool kQuads = false;
};

template <>
struct Packed<Packing::kIQ2_XXS> : OfCodebook<gguf::IQ2_XXS> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    const int64_t at = 2 + 8 * slice;
    unrolled<4>([&](auto g) {
      const auto point = Point<B>::of(put.codebook, unit[at + g], B::all(0));
      const auto seven = seven_bits<B, g>([&](int i) { return unit[at + 4 + i]; });
      put_signed(put, 8 * g, eight_signs<B>(seven),
                 [&](auto j) { return of_iq2<B, j>(point); });
    });
  }
};
template <>
struct Parts<Packing::kIQ2_XXS> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    found(0, odd<B, 4, 4>(unit[9 + 8 * slice]), B::all(0));
  }
};

// Unpacks the scales of two small blocks from a byte.
template <class B, class Found>
void two_scales(typename B::Vector both, Found found) {
  found(0, odd<B, 0, 4>(both), B::all(0));
  found(1, odd<B, 4, 4>(both), B::all(0));
}

template <>
struct Packed<Packing::kIQ2_XS> : OfCodebook<gguf::IQ2_XS> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    for (int64_t g = 0; g < 4; ++g) {
      const auto low = unit[2 + 8 * slice + 2 * g], high = unit[3 + 8 * slice + 2 * g];
      const auto point = Point<B>::of(put.codebook, low, moved<B, 0, 1>(high));
      put_signed(put, 8 * g, eight_signs<B>(moved<B, 1, 7>(high)),
                 [&](auto j) { return of_iq2<B, j>(point); });
    }
  }
};
template <>
struct Parts<Packing::kIQ2_XS> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    two_scales<B>(unit[66 + slice], found);
  }
};

template <>
struct Packed<Packing::kIQ2_S> : OfCodebook<gguf::IQ2_S> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    const auto high = unit[66 + slice];
    unrolled<4>([&](auto g) {
      const auto point =
          Point<B>::of(put.codebook, unit[2 + 4 * slice + g], moved<B, 2 * g, 2>(high));
      put_signed(put, 8 * g, unit[34 + 4 * slice + g],
                 [&](auto j) { return of_iq2<B, j>(point); });
    });
  }
};
template <>
struct Parts<Packing::kIQ2_S> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    two_scales<B>(unit[74 + slice], found);
  }
};

template <>
struct Packed<Packing::kIQ3_XXS> : OfCodebook<gguf::IQ3_XXS> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    unrolled<4>([&](auto g) {
      const int64_t at = 2 + 8 * slice + 2 * g;
      const Point<B> points[] = {Point<B>::of(put.codebook, unit[at], B::all(0)),
                                 Point<B>::of(put.codebook, unit[at + 1], B::all(0))};
      const auto seven =
          seven_bits<B, g>([&](int i) { return unit[66 + 4 * slice + i]; });
      put_signed(put, 8 * g, eight_signs<B>(seven), [&](auto j) {
        const auto level = points[j / 4].template level<4, j % 4>();
        // 4, 12, ..., 52, but 62 in place of 60.
        const auto last = moved<B, 3, 1, 1>(B::minus(level, B::all(-1)));
        return B::either(B::either(moved<B, 0, 3, 3>(level), last), B::all(4));
      });
    });
  }
};
template <>
struct Parts<Packing::kIQ3_XXS> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    found(0, odd<B, 4, 4>(unit[69 + 4 * slice]), B::all(0));
  }
};

template <>
struct Packed<Packing::kIQ3_S> : OfCodebook<gguf::IQ3_S> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    const auto high = unit[66 + slice];
    unrolled<4>([&](auto g) {
      const int64_t at = 2 + 8 * slice + 2 * g;
      const Point<B> points[] = {
          Point<B>::of(put.codebook, unit[at], moved<B, 2 * g, 1>(high)),
          Point<B>::of(put.codebook, unit[at + 1], moved<B, 2 * g + 1, 1>(high))};
      put_signed(put, 8 * g, unit[74 + 4 * slice + g], [&](auto j) {
        return odd<B, 0, 3>(points[j / 4].template level<4, j % 4>());
      });
    });
  }
};
template <>
struct Parts<Packing::kIQ3_S> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    const auto both = unit[106 + slice / 2];
    found(0, slice % 2 == 0 ? odd<B, 0, 4>(both) : odd<B, 4, 4>(both), B::all(0));
  }
};

// Returns field `i` of three bits, from two bytes.
template <class B, int i>
typename B::Vector three_bits(typename B::Vector low, typename B::Vector high) {
  if constexpr (i < 2)
    return moved<B, 3 * i, 3>(low);
  else if constexpr (i == 2)
    return B::either(moved<B, 6, 2>(low), moved<B, 0, 1, 2>(high));
  else
    return moved<B, 1, 3>(high);
}

template <>
struct Packed<Packing::kIQ1_S> : OfCodebook<gguf::IQ1_S> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    const auto low = unit[34 + 2 * slice], high = unit[35 + 2 * slice];
    const auto negative = moved<B, 7, 1>(high);
    unrolled<4>([&](auto g) {
      const auto point = Point<B>::of(put.codebook, unit[2 + 4 * slice + g],
                                      three_bits<B, g>(low, high));
      put_eighths(put, 8 * g, point, negative);
    });
  }
};
template <>
struct Parts<Packing::kIQ1_S> {
  static constexpr int kStep = 0, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    found(0, odd<B, 4, 3>(unit[35 + 2 * slice]), B::all(0));
  }
};

template <>
struct Packed<Packing::kIQ1_M> : OfCodebook<gguf::IQ1_M> {
  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     UnpackedCodes<B> put) {
    unrolled<4>([&](auto g) {
      const auto both = unit[32 + 2 * slice + g / 2];
      const auto point =
          Point<B>::of(put.codebook, unit[4 * slice + g], moved<B, g % 2 * 4, 3>(both));
      put_eighths(put, 8 * g, point, moved<B, g % 2 * 4 + 3, 1>(both));
    });
  }
};
template <>
struct Parts<Packing::kIQ1_M> {
  // The float16 is not stored in two bytes: see `step_bytes`.
  static constexpr int kStep = -1, kLow = -1;
  template <class B, bool part, class Found>
  static void each(const Unit<B, part>& unit, int64_t slice, Found found) {
    const int64_t at = 48 + slice / 2 * 2;
    const auto low = unit[at], high = unit[at + 1];
    const auto scale = [&](auto i) { return three_bits<B, i>(low, high); };
    const bool even = slice % 2 == 0;
    found(0, odd<B, 0, 3>(even ? scale(Number<0>()) : scale(Number<2>())), B::all(0));
    found(1, odd<B, 0, 3>(even ? scale(Number<1>()) : scale(Number<3>())), B::all(0));
  }

  // Collects the bytes of the float16: the upper four bits of each second byte.
  template <class B, bool part>
  static void step_bytes(const Unit<B, part>& unit, uint8_t* low, uint8_t* high) {
    const auto joined = [&](int64_t at) {
      return B::either(moved<B, 4, 4>(unit[at]), B::both(unit[at + 2], '\xf0'));
    };
    B::store(low, joined(49));
    B::store(high, joined(53));
  }
};

}  // namespace
}  // namespace eqquant
