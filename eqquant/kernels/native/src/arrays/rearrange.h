// Converts blocks of a file to stored arrays: rows of blocks of several fields become
// one array for each field, whose contracted axis comes first.
#pragma once

#include <cstdint>

namespace eqquant {

// Some bits of an element: `BitField` of `formats`.
struct Field {
  int32_t byte;    // the byte of a block
  int32_t start;   // the lowest bit in that byte
  int32_t number;  // the number of bits
  int32_t at;      // the lowest bit in the element
};

// An array to write. Element `r` of block `g` of row `i` is at
// `memory[(g * elements + r) * stride + i * size]`.
struct Target {
  uint8_t* memory;
  int64_t stride;    // in bytes
  int64_t elements;  // the number of elements of a block
  int64_t size;      // the size of an element: 1 or 2 bytes
};

// Rows of blocks. They may begin anywhere in the source, so their order may differ from
// the order of the targets.
struct Rearranged {
  const uint8_t* source;
  const int64_t* starts;  // the start of each row
  int64_t rows;
  int64_t blocks;  // the number of blocks of a row
  int64_t bytes;   // the size of a block: 16 or more
  const Target* targets;
  int64_t number;         // the number of targets
  const int32_t* counts;  // the number of fields of each element, by target
  const Field* fields;    // the fields of the elements, in order
};

// Runs on up to `threads` threads. False if there is no memory for intermediate
// results.
bool rearrange(const Rearranged& r, int64_t threads);

}  // namespace eqquant
