// Codes of bitshift trellises: what `formats/_viterbi.py` finds, bit for bit.
#pragma once

#include <cstdint>

namespace eqquant {

// `rows` of `size` integers, a multiple of 32. A row is tiles of `tile` numbers, a
// multiple of 32 too; the last one may be short.
struct TrellisEncoding {
  const int16_t* numbers;  // up to 600 in absolute value
  const int16_t* points;   // up to 510 in absolute value, one for each state
  uint32_t* words;         // `[rows, size * bits / 32]`
  int64_t rows, size, tile;
  int32_t states, bits;  // `1 << states` states; 8 to 16, and 1 to 8
};

int64_t trellis_tasks(const TrellisEncoding& e);

// Encodes some of the tiles. False if there is no memory for what is between.
bool encode_trellis(const TrellisEncoding& e, int64_t task);

}  // namespace eqquant
