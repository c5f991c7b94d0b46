// A weight of blocks that hold everything: codes, scales and minima, as in GGUF files.
#pragma once
#include "codes.cuh"
#include "copy.cuh"
#include "sizes.cuh"

// The bits of a word, moved so that `from` comes to `to`.
template <int from, int to>
ON_LANE Word moved(Word word) {
  if constexpr (from < to)
    return word << (to - from);
  else
    return word >> (from - to);
}

// Bits of a word, moved so that `from` comes to `to`, or-ed with `others`.
template <int from, int to, Word mask>
ON_LANE Word of_word(Word word, Word others) {
  return and_or(moved<from, to>(word), mask, others);
}

// The `bits` bits from `start` on, of two bytes of a word, `j` and `j + 2`, moved to `at`
// in two halves, and or-ed with `others`.
template <int start, int bits, int at>
ON_LANE Word of_two_bytes(Word word, int j, Word others) {
  constexpr Word mask = ((1u << bits) - 1 << at) * 0x00010001u;
  const Word two = j == 0 ? moved<start, at>(word) : moved<start + 8, at>(word);
  return and_or(two, mask, others);
}

// 2**15 plus the byte `i` of a word. (2**15 is 0x47000000, and its bit 8 counts one.)
ON_LANE float float_of_byte(Word word, int i) {
  return of_bits(permuted(word, 0x47000000u, 0x7404 | i << 4));
}

// Codes that are integers, without a table.
struct Integral {
  static constexpr int table_words = 0;
  ON_LANE static void fill(Word*) {}
};

// Each step is a block. `_blocks.py` writes the class `Type` from the bit fields of a
// format:
// - `size`, `numbers`, `parts`: of a block its bytes, its numbers, and the parts that
//   have scales of their own.
// - `zero`: what is subtracted from codes, which are below 128.
// - `has_minima`: whether each part has a minimum.
// - `has_steps`: whether scales (and minima) are integers times numbers in float16, which
//   belong to the block. `zero_step` is subtracted from the integers of scales.
// - `load`: loads the words of a lane: those of the header, which are the same in the
//   four lanes of a row, and those of codes.
// - `halves`: the two numbers in float16.
// - `steps`, `lows`: the integers of four parts, in four bytes.
// - `Codes`: the `Table` that decodes bytes of two codes each, or `Integral`.
// - `code`: the codes of the pair `j` of a product, in the two halves of a word.
template <class Type>
struct Blocks {
  static constexpr int kColumns = Type::numbers / 4, kParts = Type::parts;
  static constexpr bool kScalesSums = true, kAddsInputs = Type::has_minima != 0;
  static constexpr bool kHasNaN = false;
  using Codes = typename Type::Codes;
  static constexpr int table_words = Codes::table_words;
  using Scale = unsigned char;
  using Shift = unsigned char;

  struct Loaded {
    Word header[Type::header_words], codes[Type::code_words];
  };

  struct From {
    const unsigned char* block;
  };

  ON_LANE static void fill(Word* table) { Codes::fill(table); }

  ON_LANE static From from(const unsigned char* blocks, const Scale*, const Shift*,
                           long long one, long long at, int step, const Sizes& s) {
    return {blocks + (one * s.n + at) * s.row_bytes + (long long)step * Type::size};
  }

  ON_LANE static void advance(From& w, int steps, const Sizes&) {
    w.block += steps * Type::size;
  }

  ON_LANE static void load_step(Loaded& to, const From& w, int step, int d, int ahead,
                                const Sizes& s) {
    if (s.steps % ahead == 0 || step + d < s.steps) {
      Type::load(to.header, to.codes, w.block + d * Type::size, lane_of_block() % 4);
    } else {
      EACH for (int i = 0; i < Type::header_words; ++i) to.header[i] = 0;
      EACH for (int i = 0; i < Type::code_words; ++i) to.codes[i] = 0;
    }
  }

  static constexpr int kFours = (Type::parts + 3) / 4;
  struct Ready {
    Word steps[kFours], lows[kFours];
    float scale, zero, low;
  };

  ON_LANE static Ready ready(const Loaded& loaded, Word&) {
    Ready r;
    const Word halves = Type::halves(loaded.header);
    r.scale = of_half(halves);
    // (Exact, since these have few bits. Infinities become NaN, here and below.)
    r.zero = r.scale * -(32768.f + Type::zero_step);
    if constexpr (kAddsInputs) r.low = of_half(halves >> 16);
    if constexpr (Type::has_steps)
      EACH for (int i = 0; i < kFours; ++i) {
        r.steps[i] = Type::steps(loaded.header, i);
        if constexpr (kAddsInputs) r.lows[i] = Type::lows(loaded.header, i);
      }
    return r;
  }

  ON_LANE static Word pair(const Loaded& loaded, const Ready&, int i, const Word* table,
                           Word& largest) {
    if constexpr (table_words > 0) {
      return Codes::template pair<Offset::kNone>(loaded.codes, i, table, 0, largest);
    } else {
      // 128 in bfloat16 is 0x4300, and its lowest bit counts one. (With minima,
      // `minimum` subtracts it from the sum.)
      const Word found = Type::code(loaded.codes, i / 2, i % 2, 0x43004300u);
      return kAddsInputs ? found : add_pair(found, (0xc300u + Type::zero) * 0x10001u);
    }
  }

  ON_LANE static float scale(const Loaded&, const Ready& r, int part) {
    if constexpr (Type::has_steps)
      return fused(float_of_byte(r.steps[part / 4], part % 4), r.scale, r.zero);
    return fused(r.scale, 0, r.scale);
  }

  ON_LANE static float minimum(const Loaded&, const Ready& r, int part, float scale) {
    float low = fused(r.low, 0, r.low);
    if constexpr (Type::has_steps)
      low = fused(float_of_byte(r.lows[part / 4], part % 4), -r.low, 32768 * r.low);
    return fused(scale, -128, low);
  }
};
