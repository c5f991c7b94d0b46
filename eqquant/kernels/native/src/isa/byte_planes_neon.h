// Points of 4-bit codes, looked up for 16 codes at a time (NEON): like
// `isa/byte_planes.h`, but in the order of the codes.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "isa/planes.h"

namespace eqquant {
namespace {

template <bool halves>
class BytePlanes {
 public:
  explicit BytePlanes(const float* points) {
    for (int byte = 0; byte < 4; ++byte) {
      uint8_t entries[16];
      byte_of_points(points, byte, entries);
      plane_[byte] = vld1q_u8(entries);
    }
  }

  // Looks up digits of bytes: of `bits` bits, `shift` above the lowest.
  template <int shift, int bits>
  void look_up(int32x4_t codes, float32x4_t* found) const {
    uint8x16_t index = vreinterpretq_u8_s32(codes);
    if constexpr (shift > 0) index = vshrq_n_u8(index, shift);
    if constexpr (shift + bits < 8) index = vandq_u8(index, vdupq_n_u8((1 << bits) - 1));
    uint16x8_t a, b, c, d;
    interleave(2, index, c, d);
    if constexpr (halves) {
      found[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(c), 16));
      found[1] = vreinterpretq_f32_u32(vshll_high_n_u16(c, 16));
      found[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(d), 16));
      found[3] = vreinterpretq_f32_u32(vshll_high_n_u16(d, 16));
    } else {
      interleave(0, index, a, b);
      found[0] = vreinterpretq_f32_u16(vzip1q_u16(a, c));
      found[1] = vreinterpretq_f32_u16(vzip2q_u16(a, c));
      found[2] = vreinterpretq_f32_u16(vzip1q_u16(b, d));
      found[3] = vreinterpretq_f32_u16(vzip2q_u16(b, d));
    }
  }

  static void deal(const float* from, float32x4_t* to) {
    for (int v = 0; v < 4; ++v) to[v] = vld1q_f32(from + 4 * v);
  }
  static void collect(const float32x4_t* from, float* to) {
    for (int v = 0; v < 4; ++v) vst1q_f32(to + 4 * v, from[v]);
  }

 private:
  // Interleaves bytes `byte` and `byte + 1` of the points of the first eight codes, and
  // of the last.
  void interleave(int byte, uint8x16_t index, uint16x8_t& first,
                  uint16x8_t& last) const {
    const uint8x16_t low = vqtbl1q_u8(plane_[byte], index);
    const uint8x16_t high = vqtbl1q_u8(plane_[byte + 1], index);
    first = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    last = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  }

  uint8x16_t plane_[4];
};

}  // namespace
}  // namespace eqquant
