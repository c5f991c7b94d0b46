// Blocks of a file as stored arrays: rows of blocks, each of several fields, become one
// array for each field, whose contracted axis comes first.
#pragma once

#include <cstdint>

namespace eqquant {

// Some bits of an element: `BitField` of `formats`.
struct Field {
  int32_t byte;    // of a block
  int32_t start;   // the lowest bit in that byte
  int32_t number;  // of bits
  int32_t at;      // the lowest bit in the element
};

// An array to write. Element `r` of block `g` of row `i` is at
// `memory[(g * elements + r) * stride + i * size]`.
struct Target {
  uint8_t* memory;
  int64_t stride;    // in bytes
  int64_t elements;  // of a block
  int64_t size;      // of an element: 1 or 2 bytes
};

// Rows of blocks. They begin at any place of the source, so that they may be in another
// order than those of the targets.
struct Rearranged {
  const uint8_t* source;
  const int64_t* starts;  // of each row
  int64_t rows;
  int64_t blocks;  // of a row
  int64_t bytes;   // of a block: 16 or more
  const Target* targets;
  int64_t number;         // of targets
  const int32_t* counts;  // how many fields each element has, target after target
  const Field* fields;    // those of the first element, then of the next, and so on
};

// On so many threads. False if there is no memory for what is between.
bool rearrange(const Rearranged& r, int64_t threads);

}  // namespace eqquant
