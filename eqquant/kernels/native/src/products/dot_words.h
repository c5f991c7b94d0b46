// Sums of products of 16-bit integers, in pairs.
#pragma once

#include <cstdint>

#include "isa/basics.h"

namespace eqquant {
namespace {

// Sums the products of `numbers` words of `R` rows of inputs, `stride` apart, with
// four vectors of rows of a weight. A lane of `pairs` has two numbers of a row.
template <class V, int R>
EQQUANT_INLINE inline void dot_words(const int32_t* pairs, int64_t numbers,
                                     const int16_t* x, int64_t stride,
                                     typename V::Ints (&sum)[R][4]) {
  constexpr int64_t W = V::width;
  EQQUANT_UNROLL
  for (int r = 0; r < R; ++r) {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) sum[r][v] = V::ints(0);
  }
  for (int64_t k = 0; k < numbers; k += 2, pairs += 4 * W) {
    typename V::Ints w[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) w[v] = V::load(pairs + v * W);
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t two;
      __builtin_memcpy(&two, x + r * stride + k, 4);
      const typename V::Ints all = V::ints(two);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) V::add_dot16(sum[r][v], w[v], all);
    }
  }
}

// Returns one number of each row, the first or the second of its pair.
template <class V>
typename V::Floats one_of_pairs(const int32_t* pairs, bool second) {
  return V::to_floats(
      V::dot16(V::ints(0), V::load(pairs), V::ints(second ? 1 << 16 : 1)));
}

}  // namespace
}  // namespace eqquant
