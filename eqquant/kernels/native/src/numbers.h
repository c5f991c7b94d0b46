// Reads a panel of a weight of `Blocks`: some numbers of a few adjacent rows. A lane is
// a row.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "packing.h"
#include "parts.h"

namespace eqquant {
namespace {

// The largest number of codes of a row that are unpacked at a time, and the number of
// those that share a scale at least.
constexpr int64_t kPieceCodes = 128;
constexpr int64_t kRun = 16;
constexpr int64_t kRuns = kPieceCodes / kRun;

// Codes from `first` to `last` of a piece, which are of one block.
struct Run {
  int64_t first, last;
};

// A piece of a panel: some codes of each of its rows. For each run of them, and each
// row:
//
// - `zero`: the integer that is subtracted from codes, so that they are signed. 0 if
//   codes stand for points of a table. (Of each 16 codes, not of each run.)
// - `less`: what is to be subtracted in addition, from wide integers.
// - `minimum`, and `rest`: the number that a code stands for which is `less` then.
template <class V>
struct Piece {
  static constexpr int64_t kRows = V::Bytes::lanes;

  int64_t number;  // how many codes a row has
  int64_t runs;
  Run run[kRuns];
  alignas(64) uint8_t codes[kPieceCodes * kRows];
  alignas(64) uint8_t zero[kRuns * kRows];
  alignas(64) float scale[kRuns * kRows];
  alignas(64) float less[kRuns * kRows];
  alignas(64) float minimum[kRuns * kRows];
  alignas(64) float rest[kRuns * kRows];
};

// What codes stand for, before they are scaled. (`less` is that of the piece.)
template <class V>
struct IntegerPoints {
  static constexpr bool kSigned = true;
  explicit IntegerPoints(const float*) {}
  typename V::Floats operator()(typename V::Ints c, typename V::Floats) const {
    return V::to_floats(c);
  }
};
template <class V>
struct WideIntegerPoints {
  static constexpr bool kSigned = true;
  explicit WideIntegerPoints(const float*) {}
  typename V::Floats operator()(typename V::Ints c, typename V::Floats less) const {
    return V::sub(V::to_floats(c), less);
  }
};
template <class V, class Table>
struct TablePoints {
  static constexpr bool kSigned = false;
  Table table;
  explicit TablePoints(const float* points) : table(points) {}
  typename V::Floats operator()(typename V::Ints c, typename V::Floats) const {
    return table[c];
  }
};
// Floats of 8 bits, by way of float16.
template <class V, PointType type>
struct SmallFloatPoints {
  static constexpr bool kSigned = true;
  explicit SmallFloatPoints(const float*) {}
  typename V::Floats operator()(typename V::Ints c, typename V::Floats) const {
    if constexpr (type == PointType::kE5M2)
      return V::from_half(V::both(V::template left<8>(c), 0xff00));
    // Exponents are 8 less than those of float16. The largest code is NaN: a carry out
    // of it sets the highest bit of the exponent.
    const auto x = V::both(V::template left<7>(c), 0xbf80);
    const auto carry = V::both(V::minus(x, V::ints(-0x80)), 0x4000);
    return V::mul(V::from_half(V::either(x, carry)), V::all(256));
  }
};

template <class T>
struct Type {
  using type = T;
};

// Whether integers may not fit in 8 bits with a sign, once zero is subtracted.
inline bool is_wide(const Blocks& w) {
  return w.packing == Packing::kBits8 || w.offset == Offset::kZeroPoint;
}

// Calls `f` with the type of what the codes of a weight stand for.
template <class V, class F>
void with_points(const Blocks& w, F f) {
  const bool few = static_cast<int32_t>(w.packing) <= 4;
  switch (w.point_type) {
    case PointType::kIntegers:
      return is_wide(w) ? f(Type<WideIntegerPoints<V>>()) : f(Type<IntegerPoints<V>>());
    case PointType::kTable:
      return few ? f(Type<TablePoints<V, typename V::Table16>>())
                 : f(Type<TablePoints<V, typename V::Table256>>());
    case PointType::kE4M3: return f(Type<SmallFloatPoints<V, PointType::kE4M3>>());
    case PointType::kE5M2: return f(Type<SmallFloatPoints<V, PointType::kE5M2>>());
  }
}

template <class V>
class Numbers {
 public:
  static constexpr int64_t kRows = Piece<V>::kRows, W = V::width;
  static_assert(kRows == 4 * W);

  explicit Numbers(const Blocks& w) : w_(w) {
    with_packing(w.packing, [&](auto packing) {
      constexpr Packing p = decltype(packing)::value;
      unpack_ = &Numbers::unpack_as<p>;
      read_runs_ = &Numbers::read_runs_as<p>;
      codes_ = Packed<p>::kCodes;
      digit_ = Packed<p>::kDigit;
    });
    with_points<V>(w, [&](auto points) {
      using P = typename decltype(points)::type;
      decode_ = w.offset == Offset::kMinimum ? &Numbers::decode_as<P, true>
                                             : &Numbers::decode_as<P, false>;
    });
  }

  // The number of codes of a piece, but the last of a row.
  int64_t codes() const { return codes_; }
  int64_t pieces() const { return divided_up(w_.k, codes_); }

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

  // The numbers of the codes from `first` to `last` of a piece, in float32, with the
  // bits that `AbstractFormat.decode` gives them. Those of a code are `kRows` apart
  // from those of the next.
  void decode(const Piece<V>& piece, int64_t first, int64_t last, float* found) const {
    (this->*decode_)(piece, first, last, found);
  }

 private:
  template <class F>
  static void with_packing(Packing packing, F f) {
    switch (packing) {
#define EQQUANT_PACKING(name) \
  case Packing::name: return f(std::integral_constant<Packing, Packing::name>());
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
#undef EQQUANT_PACKING
    }
  }

  template <Packing packing>
  void unpack_as(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    using P = Packed<packing>;
    using B = typename V::Bytes;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    const UnpackedCodes<B> found = {piece.codes, piece.zero};
    const int64_t slice = i % P::kSlices;
    if (count == kRows)
      P::unpack(Unit<B, false>{at, w_.n, count}, slice, piece.number, found);
    else
      P::unpack(Unit<B, true>{at, w_.n, count}, slice, piece.number, found);
  }

  template <Packing packing>
  const uint8_t* read_runs_as(int64_t i, int64_t n, int64_t count, Piece<V>& piece,
                              Places& places) const {
    using P = Packed<packing>;
    const uint8_t* const at = set_runs<packing>(i, n, count, piece);
    if constexpr (P::kDigit != 0) places = P::places(i % P::kSlices);
    return at + places.first * w_.n;
  }

  // Returns the first byte of the unit.
  template <Packing packing>
  const uint8_t* set_runs(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    using P = Packed<packing>;
    const uint8_t* const at = w_.bytes + i / P::kSlices * P::kBytes * w_.n + n;
    if constexpr (is_gguf(packing))
      set_small_blocks<packing>(at, i % P::kSlices, count, piece);
    else
      set_blocks(i, n, count, piece);
    return at;
  }

  static constexpr bool is_gguf(Packing packing) {
    return static_cast<int32_t>(packing) > 8;
  }

  template <Packing packing>
  void set_small_blocks(const uint8_t* at, int64_t slice, int64_t count,
                        Piece<V>& piece) const {
    using P = Packed<packing>;
    const auto base = V::all(static_cast<float>(w_.base));
    for (int64_t v = 0; v < 4; ++v) {
      const int64_t here = larger(0, smaller(W, count - v * W));
      const BlockBytes<V> block = {at + v * W, w_.n, here};
      small_blocks<V, packing>(block, slice, [&](int64_t r, auto scale, auto minimum) {
        set(piece, r, v, {r * P::kBlock, (r + 1) * P::kBlock}, scale, base, minimum);
      });
    }
    piece.runs = divided_up(piece.number, P::kBlock);
    for (int64_t r = 0; r < piece.runs; ++r)
      piece.run[r] = {r * P::kBlock, smaller((r + 1) * P::kBlock, piece.number)};
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
          const uint8_t* const points = w_.zero_points + g * w_.n + at;
          zero = V::add(zero, V::to_floats(V::template bytes<false>(points, here)));
        }
        const auto minimum = w_.offset == Offset::kMinimum
                                 ? V::scales(w_.minima, g, at, here)
                                 : V::zero();
        set(piece, r, v, {k, end}, V::scales(w_.scales, g, at, here), zero, minimum);
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
      const int32_t bits = is_gguf(w_.packing) ? 5 : static_cast<int32_t>(w_.packing);
      const auto base = zero;
      const auto steps = V::mul(minimum, V::about_reciprocal(scale));
      zero = V::rounded(V::sub(base, steps), static_cast<float>((1 << bits) - 1));
      V::store(piece.minimum + at, minimum);
      V::store(piece.rest + at, V::add(V::mul(V::sub(zero, base), scale), minimum));
    }
    if (w_.point_type != PointType::kIntegers) {
      zero = V::zero();
    } else if (is_wide(w_)) {
      const bool eight = w_.packing == Packing::kBits8;
      const auto here = eight ? V::all(128) : V::rounded(zero, 127);
      V::store(piece.less + at, V::sub(zero, here));
      zero = here;
    }
    for (int64_t k = run.first; k < run.last; k += kRun)
      V::store_bytes(piece.zero + k / kRun * kRows + v * W, zero);
  }

  template <class P, bool minima>
  void decode_as(const Piece<V>& piece, int64_t first, int64_t last,
                 float* found) const {
    for (int64_t r = 0; r < piece.runs; ++r) {
      const Run run = {larger(first, piece.run[r].first),
                       smaller(last, piece.run[r].last)};
      if (run.first < run.last)
        decode_run<P, minima>(piece, r, run, found + (run.first - first) * kRows);
    }
  }

  template <class P, bool minima>
  void decode_run(const Piece<V>& piece, int64_t r, Run run, float* found) const {
    const P points(w_.points);
    typename V::Floats scale[4], less[4], zero[4], minimum[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t at = r * kRows + v * W;
      scale[v] = V::load(piece.scale + at);
      less[v] = V::load(piece.less + at);
      if constexpr (minima) {
        zero[v] = V::to_floats(V::template bytes<false>(
            piece.zero + run.first / kRun * kRows + v * W));
        minimum[v] = V::load(piece.minimum + at);
        // Of integers: the points, of codes as they were.
        if (P::kSigned)
          less[v] = V::sub(V::all(static_cast<float>(w_.base)), zero[v]);
      }
    }
    const uint8_t* c = piece.codes + run.first * kRows;
    for (int64_t k = run.first; k < run.last; ++k, c += kRows, found += kRows) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        auto number = points(V::template bytes<P::kSigned>(c + v * W), less[v]);
        if constexpr (minima) {
          if constexpr (std::is_same_v<P, IntegerPoints<V>>) number = V::sub(number, less[v]);
          number = V::add(V::mul(number, scale[v]), minimum[v]);
        } else {
          number = V::mul(number, scale[v]);
        }
        V::store(found + v * W, number);
      }
    }
  }

  const Blocks& w_;
  int64_t codes_;
  int digit_;
  const uint8_t* (Numbers::*read_runs_)(int64_t, int64_t, int64_t, Piece<V>&,
                                        Places&) const;
  void (Numbers::*unpack_)(int64_t, int64_t, int64_t, Piece<V>&) const;
  void (Numbers::*decode_)(const Piece<V>&, int64_t, int64_t, float*) const;
};

}  // namespace
}  // namespace eqquant
