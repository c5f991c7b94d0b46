// Vectors of four numbers, with products of 8-bit integers (FEAT_DotProd).
#pragma once

#include <arm_neon.h>

#include "isa/neon.h"

namespace eqquant {
namespace {

struct NeonDot : Neon {
  // Adds the products of four integers of 8 bits in each lane, all of which have a sign.
  static constexpr bool signs = true;
  static constexpr int small = 127;
  template <int most = 127>
  static Ints dot8(Ints sum, Ints x, Ints y) {
    return vdotq_s32(sum, s8(x), s8(y));
  }
  template <int most = 127>
  static void add_dot8(Ints& sum, Ints x, Ints y) {
    sum = dot8(sum, x, y);
  }
};

}  // namespace
}  // namespace eqquant
