// Vectors of four numbers, with products of matrices of 8-bit integers (FEAT_I8MM).
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "isa/neon_dot.h"

namespace eqquant {
namespace {

struct NeonI8mm : NeonDot {
  // Adds the products of two rows of eight 8-bit integers with two others: of the first
  // row with both, then of the second row with both.
  static Ints dot8_pairs(Ints sum, Ints x, Ints y) {
    return vmmlaq_s32(sum, s8(x), s8(y));
  }
  // Returns two rows of eight integers.
  static Ints pair(const int8_t* first, const int8_t* second) {
    return any(vcombine_s8(vld1_s8(first), vld1_s8(second)));
  }
  // Returns two pairs of rows, from the first and the last four integers of four rows.
  static void pairs(Ints first, Ints last, Ints* two) {
    two[0] = vzip1q_s32(first, last);
    two[1] = vzip2q_s32(first, last);
  }
  // Returns a number for each row of a pair.
  static Ints of_pair(int32_t first, int32_t second) {
    return vcombine_s32(vdup_n_s32(first), vdup_n_s32(second));
  }
  // Returns the sums of a pair of rows with four others, from the sums with two and
  // two.
  static void sums_of_pair(Ints low, Ints high, Ints* two) {
    const int64x2_t x = vreinterpretq_s64_s32(low), y = vreinterpretq_s64_s32(high);
    two[0] = vreinterpretq_s32_s64(vzip1q_s64(x, y));
    two[1] = vreinterpretq_s32_s64(vzip2q_s64(x, y));
  }
};

}  // namespace
}  // namespace eqquant
