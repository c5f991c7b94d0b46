// The scales of blocks, in their stored dtypes. `number` converts the bits of a scale.
#pragma once
#include "lane.cuh"

struct Float32 {
  static constexpr bool applied = true, has_nan = false;
  using Stored = Word;
  ON_LANE static float number(Word bits) { return of_bits(bits); }
};

struct BFloat16 {
  static constexpr bool applied = true, has_nan = false;
  using Stored = unsigned short;
  ON_LANE static float number(Word bits) { return of_bits(bits << 16); }
};

struct Float16 {
  static constexpr bool applied = true, has_nan = false;
  using Stored = unsigned short;
  ON_LANE static float number(Word bits) { return of_half(bits); }
};

// Powers of two, of one byte. Zero is a subnormal number. (255 becomes infinite here, and
// then NaN.)
struct E8M0 {
  static constexpr bool applied = true, has_nan = false;
  using Stored = unsigned char;
  ON_LANE static float number(Word bits) {
    return of_bits(larger(bits << 23, 0x00400000u));
  }
};

// Decodes two numbers of `e4m3fn`, given their bits but the sign from bit 4 of each half
// on, and the sign in its highest bit. `largest` is the largest `rest` so far.
ON_LANE Word of_e4m3(Word rest, Word sign, Word& largest) {
  largest = largest_of_pairs(largest, rest);
  // With its exponent in the place of bfloat16's, each number is 2**120 times too small.
  return multiply_pair(and_or(sign, 0x80008000u, rest), 0x7b807b80u);
}

// Whether any of these numbers was NaN. All bits of a NaN but its sign are ones, so
// nothing is larger.
ON_LANE Word not_a_number(Word largest) {
  return (largest + 0x00100010u) & 0x08000800u;
}

// Numbers of one byte, `e4m3fn`, which bfloat16 holds exactly.
struct E4M3 {
  static constexpr bool applied = true, has_nan = true;
  using Stored = unsigned char;
  ON_LANE static float number(Word bits) {
    Word largest = 0;
    const Word found = of_e4m3((bits & 0x7f) << 4, bits << 8, largest);
    return of_bits(not_a_number(largest) ? 0x7fc00000u : found << 16);
  }
};

// No scales: scales of whole rows are applied afterwards.
struct None {
  static constexpr bool applied = false, has_nan = false;
  using Stored = Word;
  ON_LANE static float number(Word) { return 1; }
};

// A scale as a pair of equal numbers of bfloat16. (Infinite scales become NaN, since they
// multiply numbers of both signs.)
template <class Scales>
ON_LANE Word pair_of(Word bits, Word&) {
  const float scale = Scales::number(bits);
  return round_to_pair(scale * 0 + scale);
}
template <>
ON_LANE Word pair_of<E4M3>(Word bits, Word& largest) {
  return of_e4m3((bits & 0x7f) * 0x00100010u, bits * 0x01000100u, largest);
}

// The offset that blocks have besides scales of a class `Scales`.
enum class Offset { kNone, kZeroPoint, kMinimum };

template <class Scales, Offset offset>
struct Offsets {
  using Stored = typename Scales::Stored;  // of minima
};
template <class Scales>
struct Offsets<Scales, Offset::kZeroPoint> {
  using Stored = unsigned char;
};
