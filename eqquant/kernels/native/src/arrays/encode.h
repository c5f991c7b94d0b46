// Encodes numbers as blocks of a file, for GGUF types that search for scales.
#pragma once

#include <cstdint>

namespace eqquant {

enum class NumberType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// The search of a format (`formats/gguf/_search.py`): for scales of consecutive
// integers, or of sixteen points; or for ranges, with squared or absolute errors.
enum class Search : int32_t {
  kIntegers = 0,
  kPoints = 1,
  kRanges = 2,
  kAbsoluteRanges = 3,
};

// The place of some bits of a byte in a block. The bytes before packing are the codes,
// the scales and the minima of the parts, and the two float16 scales of these.
struct StoredBits {
  int32_t from;    // the byte
  int32_t at;      // the lowest bit in it
  int32_t number;  // the number of bits
  int32_t byte;    // the byte of the block
  int32_t start;   // the lowest bit in that byte
};

// `matrices` of numbers, each with rows of `size` numbers. A row consists of blocks of
// `block` numbers, and a block of parts.
struct Encoding {
  const void* numbers;  // up to 256 in absolute value
  NumberType type;
  int64_t matrices, rows, size;
  bool across;      // whether the numbers of a row are one below another in memory
  uint8_t* blocks;  // `[matrices, blocks * bytes, rows]`
  int64_t block, part;
  bool repeats;  // whether a short block is padded with its last number, not zeros
  Search search;
  const float* factors;
  int64_t candidates;
  const float* points;  // sixteen, if they are not integers
  int32_t codes;        // the number of codes
  int32_t steps;        // the number of values of a part's scale, or 0
  int32_t zero;         // the offset added to these to store them
  int64_t bytes;        // the number of bytes of a block
  const StoredBits* bits;     // in the order of the bytes of the block
  int64_t number;       // the number of `bits`
};

int64_t encoding_tasks(const Encoding& e);

// Encodes a part of the numbers. False if there is no memory for intermediate results.
bool encode(const Encoding& e, int64_t task);

}  // namespace eqquant
