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

// As many numbers as a tile has at most.
constexpr int64_t kMostFeedback = 256;

// Tiles of which each number should come near to a target, and to what the errors of
// those before it in the tile ask: from the last number of a tile to the first, in
// which order all arrays but `words` are.
struct TrellisFeedback {
  const float* numbers;   // `[rows, size]`, from which errors are counted
  const float* targets;   // `[rows, size]`
  const float* feedback;  // `[size, size]`: how much of the error of each (the first
                          // axis) each takes; zero but for those after it
  const float* weights;   // `[size]`: what a square counts
  const int16_t* points;  // one for each state
  uint32_t* words;        // `[rows, size * bits / 32]`
  int64_t rows, size;     // a multiple of 32, up to `kMostFeedback`
  int32_t states, bits;
};

int64_t trellis_feedback_tasks(const TrellisFeedback& e);
bool encode_trellis_with_feedback(const TrellisFeedback& e, int64_t task);

}  // namespace eqquant
