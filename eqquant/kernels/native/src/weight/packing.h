// The packing of codes: unpacks bytes to one code each. A lane is a row of the weight.
#pragma once

#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "weight/weight.h"

namespace eqquant {

// The places of the digits of a slice whose codes are digits of whole bytes: from byte
// `first` of the unit on. The digits of a byte are `apart` codes from each other, and
// the digits of the next byte are `next` codes further.
struct Places {
  int64_t first, apart, next;
};

namespace {

// The default distance in bytes by which memory is prefetched: the next rows of the
// weight.
constexpr int64_t kAhead = 64;

// The same for weights whose rows are in panels. (These are read in order, which
// processors predict, but not as far ahead.)
constexpr int64_t kAheadInPanels = 6144;

// The bytes of a unit of codes, for `B::lanes` rows, or if `part`, for fewer. Reading a
// byte prefetches the one that is `ahead` bytes further.
template <class B, bool part>
struct Unit {
  const uint8_t* at;
  int64_t stride;
  int64_t rows;
  int64_t ahead = kAhead;

  typename B::Vector operator[](int64_t i) const {
    const uint8_t* const p = at + i * stride;
    if constexpr (part) return B::load(p, rows);
    prefetch<2>(p + ahead);
    return B::load(p);
  }
};

// Calls `some(first, number)` for rows of a weight that are read in turns, a few
// numbers of each: the `count` rows from row `n`, or the rows of each panel if rows are
// in panels.
template <class Some>
void in_turns(const Blocks& w, int64_t n, int64_t count, Some some) {
  const int64_t each = w.in_panels() ? kPanelRows : count;
  for (int64_t i = 0; i < count; i += each) some(n + i, smaller(each, count - i));
}

// Returns how many bytes further to prefetch while panel `p` is read, if a loop reads
// `bytes` bytes of each of `panels` panels of `rows` rows, one panel after the other,
// and then the next bytes of each. Processors do not predict this order. The distance,
// in lines of the cache, hides the latency of memory.
inline int64_t bytes_ahead(int64_t p, int64_t panels, int64_t rows, int64_t bytes,
                           const Blocks& w) {
  constexpr int64_t lines = 96;
  if (w.in_panels()) return kAheadInPanels;
  const int64_t to = p + divided_up(lines, bytes);
  return to / panels * bytes * w.n + (to % panels - p) * rows;
}

// The destination of unpacked codes: codes of position `k` go to
// `codes + k * B::lanes`. `zero` is subtracted, with one value for each 16 codes.
// (`weight/quads.h` has vectors of several codes of a row.)
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

// The same, where the compiler would not inline the calls.
template <class F, int... i>
EQQUANT_INLINE void inlined(F f, std::integer_sequence<int, i...>) {
  (f(Number<i>()), ...);
}
template <int number, class F>
EQQUANT_INLINE void inlined(F f) {
  inlined(f, std::make_integer_sequence<int, number>());
}

// Moves some bits of each byte to another place.
template <class B, int from, int bits, int to = 0>
typename B::Vector moved(typename B::Vector c) {
  constexpr auto mask = static_cast<char>(((1 << bits) - 1) << to);
  // Whether the shift leaves no other bits: bits beyond a byte, if bytes are shifted
  // alone.
  constexpr bool right = B::shifts_bytes && from + bits == 8 && to == 0;
  constexpr bool left = B::shifts_bytes && from == 0 && to + bits == 8;
  if constexpr (from == to && bits == 8) return c;
  if constexpr (from < to && left) return B::template left<to - from>(c);
  if constexpr (from > to && right) return B::template right<from - to>(c);
  if constexpr (from < to) return B::both(B::template left<to - from>(c), mask);
  if constexpr (from > to) return B::both(B::template right<from - to>(c), mask);
  return B::both(c, mask);
}

// The packing of the codes of a unit: in `kBytes` bytes, of which `unpack` takes a
// slice of `kCodes` codes at a time. (For streams, only the first `number` of these.)
// In GGUF types, `kBlock` codes share a scale.
template <Packing packing, bool gguf = is_gguf(packing),
          bool codebook = (codebook_points(packing) > 0)>
struct Packed {
  // A stream of codes of `kBits` bits, the first in the lowest bits of the first byte.
  // Eight codes end with a byte.
  static constexpr int kBits = static_cast<int>(packing);
  static constexpr int kSlices = 1, kCodes = kBits == 8 ? 32 : 64;
  static constexpr int kBytes = kCodes * kBits / 8;
  // The number of bits of a digit, or 0 if codes are not digits.
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

// Returns the number of bits by which codes of a GGUF type are higher in byte `of` of
// the bytes read, in each next slice.
template <class F>
constexpr int slice_bits(int of) {
  for (const auto& code : F::kCode)
    for (const gguf::CodeBits& bits : code)
      if (bits.of == of && bits.slice != 0) return bits.slice;
  return 0;
}
template <class F>
constexpr bool slices_differ() {
  for (int of = 0; of < static_cast<int>(std::size(F::kRead)); ++of)
    if (slice_bits<F>(of) != 0) return true;
  return false;
}

// A GGUF type without a codebook, as described in `weight/gguf.h`. (The digits of a
// byte are far apart: for 16 or 32 bytes, first the lowest digits, then the next of
// each, and so on.)
template <class F>
struct PackedFields {
  static constexpr int kSlices = F::kSlices, kCodes = F::kCodes, kBytes = F::kBytes;
  static constexpr int kBlock = F::kBlock;
  static constexpr int kReads = std::size(F::kRead), kTogether = std::size(F::kCode);
  static constexpr int kPieces = std::size(F::kCode[0]);
  static constexpr bool kWhole = kReads == 1 && kPieces == 1 && F::kEvery == 1;
  static constexpr int kDigit =
      kWhole && (F::kBits == 2 || F::kBits == 4) ? F::kBits : 0;
  static constexpr Places places(int64_t slice) {
    return {F::kRead[0].first + F::kRead[0].slice * slice, F::kTimes, F::kRead[0].code};
  }
  // Whether bytes of a row can be brought together because the same bits are taken from
  // each.
  static constexpr bool kQuads = F::kEvery == 1 && F::kTimes % 4 == 0;

  template <class B, bool part, class Put>
  static void unpack(const Unit<B, part>& unit, int64_t slice, int64_t, Put put) {
    if constexpr (slices_differ<F>() && kSlices > 2) {
      unrolled<kSlices>([&](auto s) {
        if (slice == s) unpack_slice<B, s>(unit, s, put);
      });
    } else {
      unpack_slice<B, 0>(unit, slice, put);
    }
  }

 private:
  template <class B, int of, bool part, class Put>
  static void unpack_slice(const Unit<B, part>& unit, int64_t slice, Put put) {
    for (int64_t i = 0; i < F::kTimes; i += B::together) {
      typename B::Vector c[kReads];
      unrolled<kReads>([&](auto b) {
        constexpr gguf::Byte byte = F::kRead[b];
        c[b] = unit[byte.first + byte.slice * slice + byte.code * i];
        // (For two slices, one loop is faster than two.)
        constexpr int up = kSlices == 2 ? slice_bits<F>(b) : 0;
        if constexpr (up > 0)
          if (slice == 1) c[b] = B::template right<up>(c[b]);
      });
      unrolled<kTogether>([&](auto r) {
        constexpr int first = r / F::kEvery * (F::kEvery * F::kTimes) + r % F::kEvery;
        put(first + F::kEvery * i, code<B, r, of>(c));
      });
    }
  }

  template <class B, int r, int slice, int p = 0>
  static typename B::Vector code(const typename B::Vector* c) {
    constexpr gguf::CodeBits bits = F::kCode[r][p];
    constexpr int start = bits.start + bits.slice * slice;
    const auto found = moved<B, start, bits.number, bits.at>(c[bits.of]);
    if constexpr (p + 1 == kPieces) return found;
    else return B::either(found, code<B, r, slice, p + 1>(c));
  }
};

// The fields of a packing.
template <Packing packing>
struct FieldsOf;
#define EQQUANT_PACKING(name)         \
  template <>                         \
  struct FieldsOf<Packing::k##name> { \
    using type = gguf::name;          \
  };
EQQUANT_GGUF_TYPES(EQQUANT_PACKING)
#undef EQQUANT_PACKING

template <Packing packing>
struct Packed<packing, true, false> : PackedFields<typename FieldsOf<packing>::type> {};

}  // namespace
}  // namespace eqquant
