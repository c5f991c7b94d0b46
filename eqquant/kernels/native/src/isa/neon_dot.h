// Vectors of four numbers, with products of 8-bit integers (FEAT_DotProd).
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "isa/neon.h"

namespace eqquant {
namespace {

struct NeonDot : Neon {
  // Adds the products of four signed 8-bit integers in each lane.
  static constexpr bool signs = true;
  static constexpr int small = 127;
  template <int most = 127>
  static Ints dot8(Ints sum, Ints x, Ints y) {
    return vdotq_s32(sum, s8(x), s8(y));
  }
  static Ints add_bytes(Ints sum, Ints x) {
    return any(vdotq_u32(u32(sum), u8(x), vdupq_n_u8(1)));
  }
  // Four integers by which all lanes are multiplied.
  using Four = int8x8_t;
  static Four in_a_lane(int32_t four) {
    return vreinterpret_s8_s32(vset_lane_s32(four, vdup_n_s32(0), 0));
  }
  template <int most = 127>
  static Ints dot8(Ints sum, Ints x, Four y) {
    return vdotq_lane_s32(sum, s8(x), y, 0);
  }
  template <int most = 127>
  static void add_dot8(Ints& sum, Ints x, Four y) {
    sum = dot8(sum, x, y);
  }
};

}  // namespace
}  // namespace eqquant
