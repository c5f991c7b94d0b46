// How codes are packed in weights of `Blocks`: unpacks bytes to one code each. A lane
// is a row of the weight.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels.h"

namespace eqquant {
namespace {

// How many bytes further memory is prefetched, where a loop does not say it: the next
// rows of the weight.
constexpr int64_t kAhead = 64;

// The same of weights whose rows are in panels. (These are read in order, which
// processors predict, but not as far ahead.)
constexpr int64_t kAheadInPanels = 6144;

// The bytes of a unit of codes, for `B::lanes` rows, or if `part`, for fewer. Each that
// is read prefetches the one that is `ahead` bytes further.
template <class B, bool part>
struct Unit {
  const uint8_t* at;
  int64_t stride;
  int64_t rows;
  int64_t ahead = kAhead;

  typename B::Vector operator[](int64_t i) const {
    const uint8_t* const p = at + i * stride;
    if constexpr (part) return B::load(p, rows);
    _mm_prefetch(reinterpret_cast<const char*>(p + ahead), _MM_HINT_T1);
    return B::load(p);
  }
};

// Calls `some(first, number)` for rows of a weight that are read in turns, a few
// numbers of each: the `count` rows from row `n`, or only those of a panel, where rows
// are in panels.
template <class Some>
void in_turns(const Blocks& w, int64_t n, int64_t count, Some some) {
  const int64_t each = w.in_panels() ? kPanelRows : count;
  for (int64_t i = 0; i < count; i += each) some(n + i, smaller(each, count - i));
}

// How many bytes further to prefetch while panel `p` is read, where a loop reads
// `bytes` bytes of each of `panels` panels of `rows` rows, one panel after the other,
// and then the next bytes of each. Processors do not predict this order. The distance,
// in lines of the cache, gives memory the time to answer.
inline int64_t bytes_ahead(int64_t p, int64_t panels, int64_t rows, int64_t bytes,
                           const Blocks& w) {
  constexpr int64_t lines = 96;
  if (w.in_panels()) return kAheadInPanels;
  const int64_t to = p + divided_up(lines, bytes);
  return to / panels * bytes * w.n + (to % panels - p) * rows;
}

// Where unpacked codes go: those of position `k` to `codes + k * B::lanes`. Each 16 of
// them lose what is in `zero`. (`fours.h` has vectors of several codes of a row.)
template <class B>
struct UnpackedCodes {
  uint8_t* codes;
  const uint8_t* zero;
  const uint16_t* codebook;  // see `Blocks`

  void operator()(int64_t k, typename B::Vector code) const {
    const auto less = B::load(zero + k / 16 * B::lanes);
    B::store(codes + k * B::lanes, B::minus(code, less));
  }
};

// Calls `f(Number<0>())`, `f(Number<1>())`, ...
template <class F, int... i>
void unrolled(F f, std::integer_sequence<int, i...>) {
  (f(Number<i>()), ...);
}
template <int number, class F>
void unrolled(F f) {
  unrolled(f, std::make_integer_sequence<int, number>());
}

// The same, where the compiler would leave calls.
template <class F, int... i>
EQQUANT_INLINE void inlined(F f, std::integer_sequence<int, i...>) {
  (f(Number<i>()), ...);
}
template <int number, class F>
EQQUANT_INLINE void inlined(F f) {
  inlined(f, std::make_integer_sequence<int, number>());
}

// Some bits of each byte, moved to another place.
template <class B, int from, int bits, int to = 0>
typename B::Vector moved(typename B::Vector c) {
  constexpr auto mask = static_cast<char>(((1 << bits) - 1) << to);
  if constexpr (from == to && bits == 8) return c;
  if constexpr (from < to) return B::both(B::template left<to - from>(c), mask);
  if constexpr (from > to) return B::both(B::template right<from - to>(c), mask);
  return B::both(c, mask);
}

// Where the digits of a slice are, if its codes are digits of whole bytes: from byte
// `first` of the unit on. The digits of a byte are `apart` codes from each other, and
// those of the next byte `next` codes from them.
struct Places {
  int64_t first, apart, next;
};

// How the codes of a unit are packed: in `kBytes` bytes, of which `unpack` takes a
// slice of `kCodes` codes at a time. (Of streams, only the first `number` of these.) In
// types of GGUF, `kBlock` of them share a scale.
template <Packing packing>
struct Packed {
  // A stream of codes of so many bits, the first in the lowest bits of the first byte.
  // Eight codes end with a byte.
  static constexpr int kBits = static_cast<int>(packing);
  static constexpr int kSlices = 1, kCodes = kBits == 8 ? 32 : 64;
  static constexpr int kBytes = kCodes * kBits / 8;
  // Of digits: how many bits each has, or 0.
  static constexpr int kDigit = kBits == 2 || kBits == 4 ? kBits : 0;
  static constexpr Places places(int64_t) { return {0, 1, 8 / kBits}; }

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t, int64_t number, Put put) {
    constexpr int together = kBits == 8 ? 1 : kBits == 4 ? 2 : kBits % 2 == 0 ? 4 : 8;
    for (int64_t k = 0; k < number; k += together * B::together) {
      constexpr int bytes = together * kBits / 8;
      typename B::Vector c[bytes];
      EQQUANT_UNROLL
      for (int i = 0; i < bytes; ++i) c[i] = unit[k * kBits / 8 + i];
      unrolled<together>([&](auto i) {
        constexpr int byte = i * kBits / 8, first = i * kBits % 8;
        constexpr int here = first + kBits > 8 ? 8 - first : kBits;
        auto code = moved<B, first, here>(c[byte]);
        if constexpr (here < kBits)
          code = B::either(code, moved<B, 0, kBits - here, here>(c[byte + 1]));
        put(k + i * B::together, code);
      });
    }
  }
};

template <>
struct Packed<Packing::kTrits> {
  // (A multiple of both the digits of a byte and `kRun`.)
  static constexpr int kSlices = 1, kCodes = 160, kBytes = 32;
  static constexpr int kDigit = 0;

  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t, int64_t number,
                     UnpackedCodes<B> put) {
    for (int64_t k = 0; k < number; k += 5) {
      auto c = unit[k / 5];
      EQQUANT_UNROLL
      for (int i = 0; i < 5; ++i) {
        const auto third = B::third(c);
        put(k + i, B::minus(B::minus(B::minus(c, third), third), third));
        c = third;
      }
    }
  }
};

// GGUF's types. There the digits of a byte are far apart: of 16 or 32 bytes first the
// lowest digits, then the next of each, and so on.

// Each slice is `half` bytes, from byte `start` on: first the codes of their lower four
// bits, then those of the upper four.
template <int64_t slices, int64_t bytes, int64_t start, int64_t half>
struct OfNibbles {
  static constexpr int kSlices = slices, kCodes = 2 * half, kBytes = bytes;
  static constexpr int kBlock = 32, kDigit = 4;
  static constexpr Places places(int64_t slice) {
    return {start + half * slice, half, 1};
  }

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     Put put) {
    for (int64_t i = 0; i < half; i += B::together) {
      const auto c = unit[start + half * slice + i];
      put(i, moved<B, 0, 4>(c));
      put(half + i, moved<B, 4, 4>(c));
    }
  }
};
template <>
struct Packed<Packing::kQ4_1> : OfNibbles<1, 20, 4, 16> {};
template <>
struct Packed<Packing::kQ4_K> : OfNibbles<4, 144, 16, 32> {};
template <>
struct Packed<Packing::kIQ4_XS> : OfNibbles<8, 136, 8, 16> {};

// 32 codes of 5 bits: the fifth bits, in 4 bytes, then the others.
template <class B, bool part>
void unpack_fives(const Unit<B, part>& unit, int64_t at, UnpackedCodes<B> put) {
  for (int64_t i = 0; i < 2; ++i) {
    const auto first = unit[at + i], last = unit[at + 2 + i];
    unrolled<8>([&](auto bit) {
      const int64_t k = 8 * i + bit;
      const auto c = unit[at + 4 + k];
      put(k, B::either(moved<B, 0, 4>(c), moved<B, bit, 1, 4>(first)));
      put(16 + k, B::either(moved<B, 4, 4>(c), moved<B, bit, 1, 4>(last)));
    });
  }
}

template <>
struct Packed<Packing::kQ5_0> {
  static constexpr int kSlices = 1, kCodes = 32, kBytes = 22, kBlock = 32;
  static constexpr int kDigit = 0;

  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t, int64_t,
                     UnpackedCodes<B> put) {
    unpack_fives(unit, 2, put);
  }
};

template <>
struct Packed<Packing::kQ5_1> {
  static constexpr int kSlices = 1, kCodes = 32, kBytes = 24, kBlock = 32;
  static constexpr int kDigit = 0;

  template <class B, bool part>
  static void unpack(const Unit<B, part>& unit, int64_t, int64_t,
                     UnpackedCodes<B> put) {
    unpack_fives(unit, 4, put);
  }
};

template <>
struct Packed<Packing::kQ2_K> {
  static constexpr int kSlices = 2, kCodes = 128, kBytes = 84, kBlock = 16;
  static constexpr int kDigit = 2;
  static constexpr Places places(int64_t slice) { return {16 + 32 * slice, 32, 1}; }

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     Put put) {
    for (int64_t i = 0; i < 32; i += B::together) {
      const auto c = unit[16 + 32 * slice + i];
      unrolled<4>([&](auto p) { put(32 * p + i, moved<B, 2 * p, 2>(c)); });
    }
  }
};

template <>
struct Packed<Packing::kQ3_K> {
  static constexpr int kSlices = 2, kCodes = 128, kBytes = 110, kBlock = 16;
  static constexpr int kDigit = 0;

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     Put put) {
    for (int64_t i = 0; i < 32; i += B::together) {
      auto high = unit[i];
      if (slice == 1) high = B::template right<4>(high);
      const auto c = unit[32 + 32 * slice + i];
      unrolled<4>([&](auto p) {
        put(32 * p + i, B::either(moved<B, 2 * p, 2>(c), moved<B, p, 1, 2>(high)));
      });
    }
  }
};

template <>
struct Packed<Packing::kQ5_K> {
  static constexpr int kSlices = 4, kCodes = 64, kBytes = 176, kBlock = 32;
  static constexpr int kDigit = 0;

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     Put put) {
    unrolled<4>([&](auto j) {
      if (slice != j) return;
      for (int64_t i = 0; i < 32; i += B::together) {
        const auto high = unit[16 + i], c = unit[48 + 32 * j + i];
        put(i, B::either(moved<B, 0, 4>(c), moved<B, 2 * j, 1, 4>(high)));
        put(32 + i, B::either(moved<B, 4, 4>(c), moved<B, 2 * j + 1, 1, 4>(high)));
      }
    });
  }
};

template <>
struct Packed<Packing::kQ6_K> {
  static constexpr int kSlices = 2, kCodes = 128, kBytes = 210, kBlock = 16;
  static constexpr int kDigit = 0;

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t,
                     Put put) {
    for (int64_t i = 0; i < 32; i += B::together) {
      const auto a = unit[64 * slice + i], b = unit[64 * slice + 32 + i];
      const auto high = unit[128 + 32 * slice + i];
      put(i, B::either(moved<B, 0, 4>(a), moved<B, 0, 2, 4>(high)));
      put(32 + i, B::either(moved<B, 0, 4>(b), moved<B, 2, 2, 4>(high)));
      put(64 + i, B::either(moved<B, 4, 4>(a), moved<B, 4, 2, 4>(high)));
      put(96 + i, B::either(moved<B, 4, 4>(b), moved<B, 6, 2, 4>(high)));
    }
  }
};

}  // namespace
}  // namespace eqquant
