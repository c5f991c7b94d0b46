// Weights in trellis codes, which `formats/_trellis.py` describes.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "isa/basics.h"
#include "weight/weight.h"

namespace eqquant {

// A weight of `n` rows and `k` columns. The words of rows lie side by side: a vector
// load takes the same word of consecutive rows.
struct TrellisWeight {
  const uint32_t* words;  // [the words of a row, n]
  BlockFloats scales;     // a single block
  int64_t n, k;
  int32_t bits, states;
};

namespace {

// The numbers of a tile, whose words are a cycle; and the numbers that take as many
// words as a code has bits.
constexpr int64_t kTileNumbers = 256, kWholeNumbers = 32;

// Calls `f(Number<bits>())`.
template <class F>
EQQUANT_INLINE inline void with_bits(int32_t bits, F f) {
  switch (bits) {
    case 1: return f(Number<1>());
    case 2: return f(Number<2>());
    case 3: return f(Number<3>());
    case 4: return f(Number<4>());
    case 5: return f(Number<5>());
    case 6: return f(Number<6>());
    case 7: return f(Number<7>());
    default: return f(Number<8>());
  }
}

// Reads points: integers up to 510 in absolute value, which the scale multiplies.
template <class V, int bits>
class TrellisPoints {
 public:
  using Ints = typename V::Ints;
  static constexpr int64_t W = V::width;

  explicit TrellisPoints(const TrellisWeight& w)
      : words_(w.words),
        n_(w.n),
        whole_(divided_up(w.k, kWholeNumbers)),
        mask_(V::ints((1 << w.states) - 1)) {}

  // Calls `use(Number<i>(), points)` for the number `i` of 32 from `k` on, a multiple of
  // 32, of `count` rows from row `n`, at most a vector. Points of other rows are any.
  template <class Use>
  EQQUANT_INLINE void read(int64_t k, int64_t n, int64_t count, Use use) const {
    constexpr int64_t each = kTileNumbers / kWholeNumbers;
    const int64_t i = k / kWholeNumbers, tile = i / each * each;
    const uint32_t* const at = words_ + i * bits * n_ + n;
    const int64_t after = i + 1 == smaller(whole_, tile + each) ? tile : i + 1;
    const uint32_t* const next = words_ + after * bits * n_ + n;
    if (count >= W) return decode(at, n_, next, use);
    alignas(64) uint32_t copy[(bits + 1) * W] = {};
    const auto size = static_cast<size_t>(4 * count);
    for (int j = 0; j < bits; ++j) std::memcpy(copy + j * W, at + j * n_, size);
    std::memcpy(copy + bits * W, next, size);
    decode(copy, W, copy + bits * W, use);
  }

  // Prefetches the words of the 32 numbers after those from `k` on, of `count` rows.
  EQQUANT_INLINE void prefetch_after(int64_t k, int64_t n) const {
    const int64_t i = k / kWholeNumbers;
    const uint32_t* const at = words_ + (i + 1) * bits * n_ + n;
    EQQUANT_UNROLL
    for (int j = 0; j < bits; ++j) prefetch<1>(at + j * n_);
  }

 private:
  template <class Use>
  EQQUANT_INLINE void decode(const uint32_t* at, int64_t stride, const uint32_t* next,
                             Use use) const {
    Ints words[bits + 1];
    EQQUANT_UNROLL
    for (int j = 0; j < bits; ++j) words[j] = load(at + j * stride);
    words[bits] = load(next);
    each(words, use, std::make_integer_sequence<int, kWholeNumbers>());
  }

  template <class Use, int... i>
  EQQUANT_INLINE void each(const Ints* words, Use use,
                           std::integer_sequence<int, i...>) const {
    (use(Number<i>(), point<i>(words)), ...);
  }

  template <int i>
  EQQUANT_INLINE Ints point(const Ints* words) const {
    constexpr int word = i * bits / 32, at = i * bits % 32;
    Ints state;
    // (A state has up to 16 bits.)
    if constexpr (at > 16)
      state = V::template bits_from<at>(words[word], words[word + 1], mask_);
    else
      state = V::template bits_from<at>(words[word], mask_);
    const Ints hash = V::product(state, V::ints(static_cast<int32_t>(0x83DCD12Du)));
    return V::add_bytes(V::ints(-510), hash);
  }

  static Ints load(const uint32_t* p) {
    return V::Bytes::load(reinterpret_cast<const uint8_t*>(p));
  }

  const uint32_t* words_;
  int64_t n_, whole_;
  Ints mask_;
};

}  // namespace
}  // namespace eqquant
