// How words of codes become pairs of bfloat16, which are registers of the operand of
// tensor cores. A word has the codes of one row of the weight, in the order of memory.
#pragma once
#include "lane.cuh"

// Unsigned integers of 1, 2 or 4 bits. Each pair takes one from either half of the word:
// code `i` and code `i + pairs`.
template <int bits_, int zero>
struct Integers {
  static constexpr int bits = bits_;
  static constexpr int pairs = 16 / bits;
  static constexpr int table_words = 0;

  ON_LANE static void fill(Word*) {}

  ON_LANE static void decode(Word word, const Word*, Word* pair) {
    // 128 in bfloat16 is 0x4300, and its last bit is one: a code in the low bits adds
    // itself. Then 128 and the code of zero are taken off.
    constexpr Word mask = ((1u << bits) - 1) * 0x10001u;
    constexpr Word less = (0xc300u + zero) * 0x10001u;
    EACH for (int i = 0; i < pairs; ++i)
      pair[i] = add_pair(and_or(word >> bits * i, mask, 0x43004300u), less);
  }
};

// Signed integers of 8 bits, of which pairs take one from either half of the word, too.
struct Bytes {
  static constexpr int bits = 8;
  static constexpr int pairs = 2;
  static constexpr int table_words = 0;

  ON_LANE static void fill(Word*) {}

  ON_LANE static void decode(Word word, const Word*, Word* pair) {
    EACH for (int i = 0; i < pairs; ++i) {
      const Word two = word >> 8 * i;
      // 128 and the low seven bits; less 128, or 256 of a negative number: the sign is
      // the lowest bit of the exponent.
      const Word low = and_or(two, 0x007f007fu, 0x43004300u);
      const Word less = and_or(two, 0x00800080u, 0xc300c300u);
      pair[i] = add_pair(low, less);
    }
  }
};

// Codes of 4 bits that stand for any 16 numbers of bfloat16; each pair has two
// neighbours, which are one byte. There is a table of all bytes for each lane of a warp,
// each in a bank of shared memory of its own.
template <class Points>
struct Table {
  static constexpr int bits = 4;
  static constexpr int pairs = 4;
  static constexpr int table_words = 256 * 32;

  ON_LANE static void fill(Word* table) {
    for (int i = lane_of_block(); i < table_words / 4; i += lanes_of_block()) {
      const int byte = i / 8;
      const Word pair = Points::bits(byte & 15) | Word(Points::bits(byte >> 4)) << 16;
      reinterpret_cast<Vector*>(table)[i] = {pair, pair, pair, pair};
    }
  }

  ON_LANE static void decode(Word word, const Word* table, Word* pair) {
    // `table` begins with the word of this lane. A byte, times the 128 bytes of a row.
    EACH for (int i = 0; i < pairs; ++i) {
      const Word at = (i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80;
      pair[i] = *reinterpret_cast<const Word*>(reinterpret_cast<const char*>(table) + at);
    }
  }
};
