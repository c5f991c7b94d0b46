// Encodes to bitshift trellises. Without error feedback, the codes equal the codes of
// `formats/_viterbi.py`, bit for bit.
#pragma once

#include <cstdint>

namespace eqquant {

// The arguments of an encoding: `rows` rows of `size` integers, cut into tiles of
// `tile` numbers. Both sizes are multiples of 32. The last tile may be short.
struct TrellisEncoding {
  const int16_t* numbers;  // up to 600 in absolute value
  const int16_t* points;   // up to 510 in absolute value, one for each state
  uint32_t* words;         // `[rows, size * bits / 32]`
  int64_t rows, size, tile;
  int32_t states, bits;  // `1 << states` states; 8 to 16, and 1 to 8
};

int64_t trellis_tasks(const TrellisEncoding& e);

// Encodes the tiles of a task. Returns false if its buffers cannot be allocated.
bool encode_trellis(const TrellisEncoding& e, int64_t task);

// The largest number of numbers in a tile.
constexpr int64_t kMostFeedback = 256;

// The arguments of an encoding with error feedback, one tile a row. The target of each
// number is corrected for the errors of the numbers encoded before it. All arrays over
// numbers, except `words`, go from the last number of a tile to the first.
struct TrellisFeedback {
  const float* numbers;   // `[rows, size]`: errors are relative to these
  const float* targets;   // `[rows, size]`
  const float* feedback;  // `[size, size]`: entry `[i, j]` is the factor by which the
                          // error of `i` is added to target `j`; zero unless `j > i`
  const float* weights;   // `[size]`: the weights of squared differences
  const int16_t* points;  // one for each state
  uint32_t* words;        // `[rows, size * bits / 32]`
  int64_t rows, size;     // a multiple of 32, up to `kMostFeedback`
  int32_t states, bits;
};

int64_t trellis_feedback_tasks(const TrellisFeedback& e);
bool encode_trellis_with_feedback(const TrellisFeedback& e, int64_t task);

}  // namespace eqquant
