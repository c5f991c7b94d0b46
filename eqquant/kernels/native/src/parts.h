// The scales and minima of the small blocks that a block of GGUF's types consists of.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace eqquant {
namespace {

// The bytes of a block, for `count` rows, one per lane.
template <class V>
struct BlockBytes {
  const uint8_t* at;
  int64_t stride;
  int64_t count;

  template <bool sign = false>
  typename V::Ints byte(int64_t i) const {
    const uint8_t* const p = at + i * stride;
    return count == V::width ? V::template bytes<sign>(p)
                             : V::template bytes<sign>(p, count);
  }
  // Bits `from` to `from + bits` of a byte.
  template <int from, int bits>
  typename V::Ints part(int64_t i) const {
    return V::both(V::template right<from>(byte(i)), (1 << bits) - 1);
  }
  // A float16.
  typename V::Floats half(int64_t i) const {
    return V::from_half(V::either(byte(i), V::template left<8>(byte(i + 1))));
  }
};

// `found(j, scale, minimum)` is called for each small block of a slice. Those of types
// without minima are zero.
template <class V, Packing packing, class Found>
void small_blocks(const BlockBytes<V>& block, int64_t slice, Found found) {
  const auto scaled = [](typename V::Floats step, typename V::Ints steps) {
    return V::mul(step, V::to_floats(steps));
  };
  const auto below = [](typename V::Floats step, typename V::Ints steps) {
    return V::sub(V::zero(), V::mul(step, V::to_floats(steps)));
  };
  if constexpr (packing == Packing::kQ4_1 || packing == Packing::kQ5_1) {
    found(0, block.half(0), block.half(2));
  } else if constexpr (packing == Packing::kQ5_0) {
    found(0, block.half(0), V::zero());
  } else if constexpr (packing == Packing::kQ2_K) {
    const auto step = block.half(80), low = block.half(82);
    for (int64_t j = 0; j < 8; ++j)
      found(j, scaled(step, block.template part<0, 4>(8 * slice + j)),
            below(low, block.template part<4, 4>(8 * slice + j)));
  } else if constexpr (packing == Packing::kQ3_K) {
    const auto step = block.half(108);
    unrolled<16>([&](auto i) {
      if (i / 8 != slice) return;
      const auto low = block.template part<i / 8 * 4, 4>(96 + i % 8);
      const auto high = block.template part<i / 4 * 2, 2>(104 + i % 4);
      const auto six = V::either(low, V::template left<4>(high));
      found(i % 8, scaled(step, V::minus(six, V::ints(32))), V::zero());
    });
  } else if constexpr (packing == Packing::kQ6_K) {
    const auto step = block.half(208);
    for (int64_t j = 0; j < 8; ++j)
      found(j, scaled(step, block.template byte<true>(192 + 8 * slice + j)), V::zero());
  } else {
    static_assert(packing == Packing::kQ4_K || packing == Packing::kQ5_K);
    const auto step = block.half(0), low = block.half(2);
    // Of eight scales and eight minima, the first four of each are six bits of a byte,
    // above which are two bits of the others.
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t j = (2 * slice + i) % 4, at = 4 + j;
      if (slice < 2) {
        found(i, scaled(step, block.template part<0, 6>(at)),
              below(low, block.template part<0, 6>(at + 4)));
        continue;
      }
      const auto high = V::template left<4>(block.template part<6, 2>(at));
      const auto high_low = V::template left<4>(block.template part<6, 2>(at + 4));
      found(i, scaled(step, V::either(block.template part<0, 4>(at + 8), high)),
            below(low, V::either(block.template part<4, 4>(at + 8), high_low)));
    }
  }
}

}  // namespace
}  // namespace eqquant
