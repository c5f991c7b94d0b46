// Decodes words of codes to pairs of bfloat16, which are registers of an operand of the
// tensor cores. A word has codes of one row of the weight, in the order of memory.
#pragma once
#include "scales.cuh"

// Each class decodes the pair `i` of the words of a lane by `pair`, whose other arguments
// are
// - `table`: the table that `fill` has written, beginning at the word of the lane.
//   There is none if `table_words` is zero.
// - `added`: the result of `added` for the code of zero of the row's block.
//   (`offset` tells whether each block has its own.)
// - `largest`: the largest bits so far, in which `not_a_number` finds NaNs (`has_nan`).

// Unsigned integers of 2 or 4 bits. Each pair takes one code from each half of the
// word: code `i` and code `i + pairs`.
template <int bits_, int zero_>
struct Integers {
  static constexpr int bits = bits_, pairs = 16 / bits, zero = zero_;
  static constexpr int table_words = 0;
  static constexpr bool has_nan = false;
  // What must be added to points of blocks with minima. (They are not decoded less 128.)
  static constexpr int missing = -128;

  ON_LANE static void fill(Word*) {}

  // Minus 128, minus the code of zero.
  ON_LANE static Word added(Word zero_of_block) {
    return (0xc300u + zero_of_block) * 0x10001u;
  }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word*, Word added, Word&) {
    // 128 in bfloat16 is 0x4300, and its lowest bit counts one: `or` with a code adds
    // the code.
    constexpr Word mask = ((1u << bits) - 1) * 0x10001u;
    const Word word = words[i / pairs] >> bits * (i % pairs);
    const Word found = and_or(word, mask, 0x43004300u);
    return offset == Offset::kMinimum ? found : add_pair(found, added);
  }
};

// The bytes `a`, `a + 1`, `b` and `b + 1` of some words. (`a` is even.)
ON_LANE Word two_and_two(const Word* words, int a, int b) {
  const int i = a / 4, j = b / 4, first = a % 4 | a % 4 + 1 << 4;
  if (b % 4 != 3)
    return permuted(words[i], words[j], first | 4 + b % 4 << 8 | 5 + b % 4 << 12);
  if (i == j) return permuted(words[i], words[j + 1], first | 0x4300);
  const Word two = permuted(words[j], words[j + 1], 0x43);
  return permuted(words[i], two, first | 0x5400);
}

// A stream of unsigned integers of up to 7 bits. Each pair takes one code from each half
// of the `bytes` bytes of a lane: code `i` and code `i + pairs`.
template <int bits_, int zero_, int bytes>
struct Stream {
  static constexpr int bits = bits_, zero = zero_, pairs = bytes * 4 / bits;
  static constexpr int table_words = 0, missing = -128;
  static constexpr bool has_nan = false;

  ON_LANE static void fill(Word*) {}
  ON_LANE static Word added(Word zero_of_block) {
    return (0xc300u + zero_of_block) * 0x10001u;
  }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word*, Word added, Word&) {
    const int at = bits * i / 16 * 2, start = bits * i % 16, here = 16 - start;
    constexpr Word all = (1u << bits) - 1;
    const Word two = two_and_two(words, at, at + bytes / 2) >> start;
    const Word low = here < bits ? (1u << here) - 1 : all;
    Word found = and_or(two, low * 0x10001u, 0x43004300u);
    if (here < bits) {
      const Word next = two_and_two(words, at + 2, at + 2 + bytes / 2) << here;
      found = and_or(next, (all ^ low) * 0x10001u, found);
    }
    return offset == Offset::kMinimum ? found : add_pair(found, added);
  }
};

// Codes of one bit: -1 and 1.
struct Signs {
  static constexpr int bits = 1, pairs = 16, zero = 0;
  static constexpr int table_words = 0, missing = 0;
  static constexpr bool has_nan = false;

  ON_LANE static void fill(Word*) {}
  ON_LANE static Word added(Word) { return 0; }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word*, Word, Word&) {
    // The code flips the sign of -1.
    const Word word = words[i / pairs] << (15 - i % pairs);
    return and_xor(word, 0x80008000u, 0xbf80bf80u);
  }
};

// Integers of 8 bits. Again, each pair takes one code from each half of the word.
// Unsigned integers are decoded less 128.
template <bool is_signed>
struct Bytes {
  static constexpr int bits = 8, pairs = 2, zero = 0;
  static constexpr int table_words = 0, missing = is_signed ? 0 : 128;
  static constexpr bool has_nan = false;

  ON_LANE static void fill(Word*) {}
  ON_LANE static Word added(Word zero_of_block) {
    // (An integer of up to 8 bits and a sign fits in the upper half of a float.)
    return (bits_of(float(missing - int(zero_of_block))) >> 16) * 0x10001u;
  }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word*, Word added, Word&) {
    const Word two = words[i / pairs] >> 8 * (i % pairs);
    // `low` is 128 plus the low seven bits. `less` is -128, or -256 for a negative
    // number, since the sign is the lowest bit of the exponent. For unsigned integers,
    // it is -256, or -128 if the highest bit is set.
    const Word low = and_or(two, 0x007f007fu, 0x43004300u);
    const Word less = is_signed ? and_or(two, 0x00800080u, 0xc300c300u)
                                : and_xor(two, 0x00800080u, 0xc380c380u);
    const Word found = add_pair(low, less);
    return offset == Offset::kZeroPoint ? add_pair(found, added) : found;
  }
};

// Floating-point numbers of 8 bits, `e4m3fn`, with the same pairs.
struct Floats {
  static constexpr int bits = 8, pairs = 2, zero = 0;
  static constexpr int table_words = 0, missing = 0;
  static constexpr bool has_nan = true;

  ON_LANE static void fill(Word*) {}
  ON_LANE static Word added(Word) { return 0; }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word*, Word, Word& largest) {
    const Word word = words[i / pairs];
    const bool first = i % pairs == 0;
    const Word rest = (first ? word << 4 : word >> 4) & 0x07f007f0u;
    return of_e4m3(rest, first ? word << 8 : word, largest);
  }
};

// Codes of 4 bits that stand for any 16 numbers of bfloat16. Each pair is the two codes
// of a byte. Each lane of a warp has its own table of all bytes, in its own bank of
// shared memory.
template <class Points>
struct Table {
  static constexpr int bits = 4, pairs = 4, zero = 0;
  static constexpr int table_words = 256 * 32, missing = 0;
  static constexpr bool has_nan = false;

  ON_LANE static Word added(Word) { return 0; }

  ON_LANE static void fill(Word* table) {
    for (int i = lane_of_block(); i < table_words / 4; i += lanes_of_block()) {
      const int byte = i / 8;
      const Word pair = Points::bits(byte & 15) | Word(Points::bits(byte >> 4)) << 16;
      reinterpret_cast<Vector*>(table)[i] = {pair, pair, pair, pair};
    }
  }

  template <Offset offset>
  ON_LANE static Word pair(const Word* words, int i, const Word* table, Word, Word&) {
    // The offset is the byte times the 128 bytes of a row of the table.
    const Word word = words[i / pairs];
    const int byte = i % pairs;
    const Word at = (byte == 0 ? word << 7 : word >> (8 * byte - 7)) & 0x7f80;
    return *reinterpret_cast<const Word*>(reinterpret_cast<const char*>(table) + at);
  }
};
