// Numbers as blocks of a file: what the types of GGUF whose scales are searched for
// encode.
#pragma once

#include <cstdint>

namespace eqquant {

enum class NumberType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// What the search of a format tries (`formats/gguf/_search.py`): scales for consecutive
// integers, or for sixteen points; or ranges, whose errors count by their squares or by
// their absolute values.
enum class Search : int32_t {
  kIntegers = 0,
  kPoints = 1,
  kRanges = 2,
  kAbsoluteRanges = 3,
};

// Where some bits of a byte are stored in a block. The bytes of a block are its codes,
// the scales and the minima of its parts, and the two scales in float16 of these.
struct StoredBits {
  int32_t from;    // the byte
  int32_t at;      // the lowest bit in it
  int32_t number;  // of bits
  int32_t byte;    // of the block
  int32_t start;   // the lowest bit in that
};

// `matrices` of numbers, each of as many rows of `size` numbers. A row is blocks of
// `block` numbers, which consist of parts.
struct Encoding {
  const void* numbers;  // up to 256 in absolute value
  NumberType type;
  int64_t matrices, rows, size;
  bool across;      // whether the numbers of a row are one below another in memory
  uint8_t* blocks;  // `[matrices, blocks * bytes, rows]`
  int64_t block, part;
  bool repeats;  // whether its last number fills up a short block, and not zeros
  Search search;
  const float* factors;
  int64_t candidates;
  const float* points;  // sixteen, if they are not integers
  int32_t codes;        // how many there are
  int32_t steps;        // how many scales of parts there are, or none of their own
  int32_t zero;         // what is added to these to store them
  int64_t bytes;        // of a block
  const StoredBits* bits;     // in the order of the bytes of the block
  int64_t number;       // of them
};

int64_t encoding_tasks(const Encoding& e);

// Encodes a part of the numbers. False if there is no memory for what is between.
bool encode(const Encoding& e, int64_t task);

}  // namespace eqquant
