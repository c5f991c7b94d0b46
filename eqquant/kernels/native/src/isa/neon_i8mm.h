// Vectors of four numbers, with products of matrices of 8-bit integers (FEAT_I8MM).
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "isa/neon_dot.h"

namespace eqquant {
namespace {

struct NeonI8mm : NeonDot {
  // Adds the products of two rows of eight integers of 8 bits with two others: of the
  // first with both, then of the second with both.
  static Ints dot8_pairs(Ints sum, Ints x, Ints y) {
    return vmmlaq_s32(sum, s8(x), s8(y));
  }
  // Two rows of eight integers.
  static Ints pair(const int8_t* first, const int8_t* second) {
    return any(vcombine_s8(vld1_s8(first), vld1_s8(second)));
  }
  // Two pairs of rows, from the first and the last four integers of four rows.
  static void pairs(Ints first, Ints last, Ints* two) {
    two[0] = vzip1q_s32(first, last);
    two[1] = vzip2q_s32(first, last);
  }
  // A number for each row of a pair.
  static Ints of_pair(int32_t first, int32_t second) {
    return vcombine_s32(vdup_n_s32(first), vdup_n_s32(second));
  }
  // Sums of a pair of rows with four others, from those with two and two.
  static void sums_of_pair(Ints low, Ints high, Ints* two) {
    const int64x2_t x = vreinterpretq_s64_s32(low), y = vreinterpretq_s64_s32(high);
    two[0] = vreinterpretq_s32_s64(vzip1q_s64(x, y));
    two[1] = vreinterpretq_s32_s64(vzip2q_s64(x, y));
  }
};

}  // namespace
}  // namespace eqquant
