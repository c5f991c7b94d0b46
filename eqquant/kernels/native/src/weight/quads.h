// Unpacks codes to bytes, four of a row side by side, which are a lane of 8-bit integer
// products. The lanes are in the order of `weight/panel.h`.
//
// Bytes of a row are brought together before codes are extracted, since there are fewer
// bytes than codes.
#pragma once

#include <cstdint>

#include "weight/codebooks.h"
#include "weight/packing.h"
#include "weight/panel.h"
#include "weight/panel_reader.h"
#include "weight/points.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// Four bytes of each row of a panel.
template <class V>
struct Quads {
  using B = typename V::Bytes;
  struct Vector {
    typename V::Ints of[4];
  };
  static constexpr int64_t lanes = B::lanes;
  static constexpr int together = 4;
  static constexpr bool shifts_bytes = B::shifts_bytes;

  static Vector both(Vector x, char y) {
    return each([&](int v) { return B::both(x.of[v], y); });
  }
  static Vector either(Vector x, Vector y) {
    return each([&](int v) { return B::either(x.of[v], y.of[v]); });
  }
  template <int bits>
  static Vector right(Vector x) {
    return each([&](int v) { return B::template right<bits>(x.of[v]); });
  }
  template <int bits>
  static Vector left(Vector x) {
    return each([&](int v) { return B::template left<bits>(x.of[v]); });
  }

 private:
  template <class F>
  static Vector each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
};

// If `part`, there may be fewer rows, and bytes from `bytes` on are zeros.
template <class V, bool part>
struct Unit<Quads<V>, part> {
  using B = typename V::Bytes;

  const uint8_t* at;
  int64_t stride;
  int64_t rows;
  int64_t apart;  // the distance of bytes of a row that are brought together
  int64_t bytes;
  int64_t ahead = kAhead;

  typename Quads<V>::Vector operator[](int64_t i) const {
    typename B::Vector byte[4];
    unrolled<4>([&](auto j) {
      const int64_t b = i + j * apart;
      if (part && b >= bytes) byte[j] = B::all(0);
      else if (part && rows < B::lanes)
        byte[j] = Unit<B, true>{at, stride, rows}[b];
      else byte[j] = Unit<B, false>{at, stride, rows, ahead}[b];
    });
    typename Quads<V>::Vector found;
    V::interleave(byte, found.of);
    return found;
  }
};

// Whether `unpack` of a packing can bring bytes together: the codes have to be the same
// bits of different bytes.
constexpr bool has_fours(Packing packing) {
  if (!is_gguf(packing)) return packing != Packing::kTrits;
#define EQQUANT_PACKING(name) \
  case Packing::k##name: return Packed<Packing::k##name>::kQuads;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, false)
#undef EQQUANT_PACKING
}

// The same with these points and offsets: codes that are not unsigned integers have no
// offset.
template <Packing packing>
constexpr bool has_fours(PointType points, Offset offset) {
  if (!has_fours(packing) || !exists<packing>(points, offset)) return false;
  if (points == PointType::kTable && !has_few_points(packing)) return false;
  return points == PointType::kIntegers || offset == Offset::kNone;
}

// Returns the distance in a row between the four codes of a lane.
constexpr int64_t apart_in_fours(Packing packing) {
  const int64_t bits = static_cast<int64_t>(packing);
  return is_gguf(packing) || bits == 8 ? 1 : bits == 4 ? 2 : bits % 2 == 0 ? 4 : 8;
}

// Whether each lane of four codes is within one block.
inline bool whole_fours(const Blocks& w) {
  const int64_t whole = larger(kRun, 4 * apart_in_fours(w.packing));
  return is_gguf(w.packing) || w.block >= w.k || w.block % whole == 0;
}

// Whether the codes of a weight can be unpacked to 8-bit integers, four at a time:
// codes that are not unsigned integers have no offset.
inline bool has_fours(const Blocks& w) {
  const bool integers = w.point_type == PointType::kIntegers;
  if (!has_fours(w.packing) || (!integers && w.offset != Offset::kNone)) return false;
  if (w.point_type == PointType::kTable) {
    if (!has_few_points(w)) return false;
    for (int i = 0; i < 16; ++i)
      if (!(w.points[i] >= -127 && w.points[i] <= 127)) return false;
  } else if (!integers && w.point_type != PointType::kSigned) {
    return false;
  }
  return whole_fours(w);
}

// How codes become unsigned or signed integers, as products need them.
enum class Unsigned { kAsTheyAre, kFlipped, kLookedUp };

constexpr PointType points_of(Unsigned how) {
  if (how == Unsigned::kLookedUp) return PointType::kTable;
  return how == Unsigned::kFlipped ? PointType::kSigned : PointType::kIntegers;
}

template <class V, Unsigned how>
class Fours {
 public:
  using B = typename V::Bytes;
  using Vector = typename B::Vector;
  static constexpr int64_t kRows = Numbers<V>::kRows;

  explicit Fours(const Blocks& w) : w_(w) {
    int8_t table[16] = {};
    if (how == Unsigned::kLookedUp)
      for (int i = 0; i < 16; ++i)
        table[i] = static_cast<int8_t>(static_cast<int>(w.points[i]) +
                                       (V::signs ? 0 : 128));
    table_ = B::table(table);
  }

  // Returns the difference between integers and points. The highest bit of 8-bit codes
  // is flipped, if products need signed integers and codes are unsigned, or the other
  // way around.
  template <Packing packing>
  static constexpr int32_t larger_by() {
    if (V::signs) return flips<packing>() ? -128 : 0;
    return how == Unsigned::kAsTheyAre ? 0 : 128;
  }

  // The integer that stands for zero, of codes of a weight without zero-points.
  int32_t base() const { return how == Unsigned::kAsTheyAre ? w_.base : 0; }

  // Returns the integers of codes.
  template <Packing packing>
  Vector of(Vector code) const {
    if constexpr (flips<packing>())
      return B::differing(code, B::all(static_cast<char>(0x80)));
    return how == Unsigned::kLookedUp ? B::look_up(table_, code) : code;
  }

  // Unpacks `number` codes of piece `i` of `count` rows, whose unit begins at `at`, and
  // prefetches `ahead` bytes further. Four vectors take the places of position `k` and
  // of the three after it.
  template <Packing packing>
  void unpack(int64_t i, const uint8_t* at, int64_t count, int64_t number,
              int64_t ahead, uint8_t* codes) const {
    each<packing>(i, at, count, number, ahead,
                  [&](int64_t k, const typename Quads<V>::Vector& some) {
                    EQQUANT_UNROLL
                    for (int v = 0; v < 4; ++v)
                      B::store(codes + (k + v) * kRows, of<packing>(some.of[v]));
                  });
  }

  // Calls `put(k, four)` for these vectors instead, with unchanged codes.
  template <Packing packing, class Put>
  void each(int64_t i, const uint8_t* at, int64_t count, int64_t number, int64_t ahead,
            Put put) const {
    using P = Packed<packing>;
    constexpr int bits = static_cast<int>(packing);
    constexpr bool gguf = is_gguf(packing);
    const int64_t apart = gguf ? 1 : divided_up(apart_in_fours(packing) * bits, 8);
    const int64_t bytes = gguf ? P::kBytes : divided_up(number * bits, 8);
    if (count == kRows && number == P::kCodes)
      P::unpack(Unit<Quads<V>, false>{at, w_.stride(), count, apart, bytes, ahead},
                i % P::kSlices, number, put);
    else
      P::unpack(Unit<Quads<V>, true>{at, w_.stride(), count, apart, bytes},
                i % P::kSlices, number, put);
  }

 private:
  template <Packing packing>
  static constexpr bool flips() {
    if (!V::signs) return how == Unsigned::kFlipped;
    return how == Unsigned::kAsTheyAre && packing == Packing::kBits8;
  }

  const Blocks& w_;
  Vector table_;
};

}  // namespace
}  // namespace eqquant
