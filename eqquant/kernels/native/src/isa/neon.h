// Vectors of four numbers (NEON, on 64-bit ARM), which has 32 registers. `isa/avx2.h`
// has the same interface.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "isa/basics.h"
#include "isa/byte_planes_neon.h"
#include "isa/number_types.h"

namespace eqquant {
namespace {

// All integers have one type, whatever their size, like on x86.
inline int8x16_t s8(int32x4_t x) { return vreinterpretq_s8_s32(x); }
inline uint8x16_t u8(int32x4_t x) { return vreinterpretq_u8_s32(x); }
inline uint16x8_t u16(int32x4_t x) { return vreinterpretq_u16_s32(x); }
inline uint32x4_t u32(int32x4_t x) { return vreinterpretq_u32_s32(x); }
inline int32x4_t any(int8x16_t x) { return vreinterpretq_s32_s8(x); }
inline int32x4_t any(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
inline int32x4_t any(uint16x8_t x) { return vreinterpretq_s32_u16(x); }
inline int32x4_t any(uint32x4_t x) { return vreinterpretq_s32_u32(x); }

// Vectors of 16 bytes.
struct Bytes128 {
  using Vector = int32x4_t;
  static constexpr int64_t lanes = 16;
  static constexpr int together = 1;  // the number of codes of a row in a vector
  static constexpr bool shifts_bytes = true;

  static Vector load(const uint8_t* p) { return any(vld1q_u8(p)); }
  static Vector load(const uint8_t* p, int64_t count) {
    uint8_t copy[16] = {};
    std::memcpy(copy, p, static_cast<size_t>(count));
    return load(copy);
  }
  static void store(uint8_t* p, Vector x) { vst1q_u8(p, u8(x)); }
  static Vector all(char x) { return any(vdupq_n_u8(static_cast<uint8_t>(x))); }
  static Vector both(Vector x, char y) { return vandq_s32(x, all(y)); }
  static Vector either(Vector x, Vector y) { return vorrq_s32(x, y); }
  static Vector differing(Vector x, Vector y) { return veorq_s32(x, y); }
  static Vector minus(Vector x, Vector y) { return any(vsubq_u8(u8(x), u8(y))); }
  // Shifts bytes. (The methods of `isa/avx2.h` shift pairs of bytes: no bits of a
  // neighbour are ever used.)
  template <int bits>
  static Vector right(Vector x) {
    if constexpr (bits == 0) return x;
    else return any(vshrq_n_u8(u8(x), bits));
  }
  template <int bits>
  static Vector left(Vector x) {
    return any(vshlq_n_u8(u8(x), bits));
  }
  // Divides each byte by three, rounded down: `c * 171 >> 9`.
  static Vector third(Vector c) {
    const uint16x8_t low = vmull_u8(vget_low_u8(u8(c)), vdup_n_u8(171));
    const uint16x8_t high = vmull_high_u8(u8(c), vdupq_n_u8(171));
    const uint8x16_t upper =
        vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    return any(vshrq_n_u8(upper, 1));
  }
  // Loads a table of 16 bytes.
  static Vector table(const int8_t* entries) { return any(vld1q_s8(entries)); }
  static Vector look_up(Vector table, Vector i) {
    return any(vqtbl1q_u8(u8(table), u8(i)));
  }
  // Converts from the order of rows to the order of lanes, which is the same here.
  static Vector to_lanes(Vector rows) { return rows; }
};

struct Neon {
  using Bytes = Bytes128;
  using Floats = float32x4_t;
  using Ints = int32x4_t;
  static constexpr int64_t width = 4;
  static constexpr int64_t registers = 32;

  static Floats zero() { return vdupq_n_f32(0); }
  static Floats all(float x) { return vdupq_n_f32(x); }
  static Floats load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Floats x) { vst1q_f32(p, x); }
  static Floats add(Floats x, Floats y) { return vaddq_f32(x, y); }
  static Floats sub(Floats x, Floats y) { return vsubq_f32(x, y); }
  static Floats mul(Floats x, Floats y) { return vmulq_f32(x, y); }
  static Floats div(Floats x, Floats y) { return vdivq_f32(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return vfmaq_f32(z, x, y); }
  // `z - x * y`.
  static Floats fnma(Floats x, Floats y, Floats z) { return vfmsq_f32(z, x, y); }
  static Floats nearest(Floats x) { return vrndnq_f32(x); }
  // An approximation of `1 / x`.
  static Floats about_reciprocal(Floats x) {
    const Floats found = vrecpeq_f32(x);  // 8 bits, and 16 after a step.
    return mul(found, vrecpsq_f32(x, found));
  }
  // Returns the nearest integer from 0 to `most`; NaN also becomes one of these.
  static Floats rounded(Floats x, float most) {
    return nearest(vmaxnmq_f32(vminnmq_f32(x, all(most)), zero()));
  }
  static float sum(Floats x) { return vaddvq_f32(x); }

  // The same numbers in float64. In memory, each takes the space of two floats.
  struct Wide {
    float64x2_t low, high;
  };
  static Wide wide(Floats x) {
    return {vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)};
  }
  static Wide add(Wide x, Floats y) {
    const Wide more = wide(y);
    return {vaddq_f64(x.low, more.low), vaddq_f64(x.high, more.high)};
  }
  static Floats narrow(Wide x) {
    return vcvt_high_f32_f64(vcvt_f32_f64(x.low), x.high);
  }
  static Wide load_wide(const float* p) {
    return {vreinterpretq_f64_f32(load(p)), vreinterpretq_f64_f32(load(p + width))};
  }
  static void store_wide(float* p, Wide x) {
    store(p, vreinterpretq_f32_f64(x.low));
    store(p + width, vreinterpretq_f32_f64(x.high));
  }

  // A mask of the first `count` lanes. Masked loads give zeros in the other lanes.
  struct Mask {
    uint32x4_t of;
  };
  static Mask first(int64_t count) {
    const int32_t lane[4] = {0, 1, 2, 3};
    return {vcltq_s32(vld1q_s32(lane), ints(static_cast<int32_t>(count)))};
  }
  static Mask at_least(Ints x, Ints y) { return {vcgeq_s32(x, y)}; }
  static Mask without(Mask x, Mask y) { return {vbicq_u32(x.of, y.of)}; }
  static uint32_t bits(Mask x) {
    const uint32_t bit[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vld1q_u32(bit), x.of));
  }
  static Floats load(const float* p, int64_t count) {
    if (count >= width) return load(p);
    float copy[width] = {};
    std::memcpy(copy, p, 4 * static_cast<size_t>(count));
    return load(copy);
  }
  static void store(float* p, Floats x, int64_t count) {
    if (count >= width) return store(p, x);
    float copy[width];
    store(copy, x);
    std::memcpy(p, copy, 4 * static_cast<size_t>(count));
  }

  static Floats only(Floats x, Mask mask) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask.of));
  }
  static Floats only(Floats x, int64_t count) { return only(x, first(count)); }
  static Ints only(Ints x, Mask mask) { return any(vandq_u32(u32(x), mask.of)); }
  // Returns a bit for each lane that is NaN.
  static uint32_t nans(Floats x) { return bits({vmvnq_u32(vceqq_f32(x, x))}); }

  // Widens bytes to integers, with or without a sign.
  template <bool sign>
  static Ints bytes(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const uint8x8_t x = vreinterpret_u8_u32(vdup_n_u32(four));
    if constexpr (sign)
      return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x))));
    else
      return any(vmovl_u16(vget_low_u16(vmovl_u8(x))));
  }
  template <bool sign>
  static Ints bytes(const uint8_t* p, int64_t count) {
    if (count == width) return bytes<sign>(p);
    uint8_t copy[width] = {};
    std::memcpy(copy, p, static_cast<size_t>(count));
    return bytes<sign>(copy);
  }
  template <int bits>
  static Ints right(Ints x) {
    return any(vshrq_n_u32(u32(x), bits));
  }
  // For integers below 2**15.
  static Ints times(Ints x, int32_t y) { return vmulq_s32(x, ints(y)); }
  // The low 32 bits of products.
  static Ints product(Ints x, Ints y) { return vmulq_s32(x, y); }
  static Ints minus(Ints x, Ints y) { return vsubq_s32(x, y); }
  template <int bits>
  static Ints left(Ints x) {
    return vshlq_n_s32(x, bits);
  }
  static Ints add(Ints x, Ints y) { return vaddq_s32(x, y); }
  static Ints max(Ints x, Ints y) { return vmaxq_s32(x, y); }
  static int32_t sum(Ints x) { return vaddvq_s32(x); }
  static int32_t largest(Ints x) { return vmaxvq_s32(x); }
  static Ints ints(int32_t x) { return vdupq_n_s32(x); }
  static Ints load(const int32_t* p) { return vld1q_s32(p); }
  static void store(int32_t* p, Ints x) { vst1q_s32(p, x); }
  static Ints either(Ints x, Ints y) { return vorrq_s32(x, y); }
  static Ints both(Ints x, int32_t y) { return vandq_s32(x, ints(y)); }
  // Returns the bits of `mask` from bit `at` on, of pairs of words.
  template <int at>
  static Ints bits_from(Ints low, Ints high, Ints mask) {
    return vandq_s32(vsliq_n_s32(right<at>(low), high, 32 - at), mask);
  }
  template <int at>
  static Ints bits_from(Ints low, Ints mask) {
    if constexpr (at == 0) return vandq_s32(low, mask);
    else return vandq_s32(right<at>(low), mask);
  }
  // Adds the four bytes of each lane, without signs.
  static Ints add_bytes(Ints sum, Ints x) {
    return any(vpadalq_u16(u32(sum), vpaddlq_u8(u8(x))));
  }

  // Brings four bytes of each row together in a lane: see `weight/panel.h`.
  static void interleave(const Ints* byte, Ints* lanes) {
    const uint16x8_t ab0 = low_bytes(byte[0], byte[1]);
    const uint16x8_t ab1 = high_bytes(byte[0], byte[1]);
    const uint16x8_t cd0 = low_bytes(byte[2], byte[3]);
    const uint16x8_t cd1 = high_bytes(byte[2], byte[3]);
    lanes[0] = any(vzip1q_u16(ab0, cd0));
    lanes[1] = any(vzip2q_u16(ab0, cd0));
    lanes[2] = any(vzip1q_u16(ab1, cd1));
    lanes[3] = any(vzip2q_u16(ab1, cd1));
  }
  // Converts four vectors of numbers from the order of rows to the order of these
  // lanes, and back.
  static void to_lanes(const Floats* from, Floats* to) {
    for (int v = 0; v < 4; ++v) to[v] = from[v];
  }
  static void to_rows(const Floats* from, Floats* to) { to_lanes(from, to); }

  static Ints to_ints(Floats x) { return vcvtnq_s32_f32(x); }
  // Stores integers of 8 and of 16 bits, saturated.
  static void store_bytes(int8_t* p, Ints x, int64_t count) {
    const int16x4_t words = vqmovn_s32(x);
    int8_t bytes[8];
    vst1_s8(bytes, vqmovn_s16(vcombine_s16(words, words)));
    if (count == width) std::memcpy(p, bytes, 4);
    else std::memcpy(p, bytes, static_cast<size_t>(count));
  }
  // Stores the lowest byte of each number.
  static void store_bytes(uint8_t* p, Floats x) {
    const uint16x4_t words = vmovn_u32(u32(to_ints(x)));
    uint8_t bytes[8];
    vst1_u8(bytes, vmovn_u16(vcombine_u16(words, words)));
    std::memcpy(p, bytes, 4);
  }
  // Converts from the bits of float16.
  static Floats from_half(Ints x) {
    return from_16_bits(vmovn_u32(u32(x)), ScaleType::kFloat16);
  }
  // Converts from the lower and the upper bytes of float16.
  static void from_halves(Ints low, Ints high, Floats* found) {
    const float16x8_t first = vreinterpretq_f16_u16(low_bytes(low, high));
    const float16x8_t last = vreinterpretq_f16_u16(high_bytes(low, high));
    found[0] = vcvt_f32_f16(vget_low_f16(first));
    found[1] = vcvt_high_f32_f16(first);
    found[2] = vcvt_f32_f16(vget_low_f16(last));
    found[3] = vcvt_high_f32_f16(last);
  }
  // Loads 16-bit numbers of the rows of a panel, in the order of lanes.
  static void halves_in_lanes(const uint16_t* p, ScaleType type, Floats* lanes) {
    for (int v = 0; v < 4; ++v) lanes[v] = from_16_bits(vld1_u16(p + width * v), type);
  }
  static Floats from_16_bits(uint16x4_t x, ScaleType type) {
    return type == ScaleType::kFloat16 ? vcvt_f32_f16(vreinterpret_f16_u16(x))
                                       : vreinterpretq_f32_u32(vshll_n_u16(x, 16));
  }
  static Floats to_floats(Ints x) { return vcvtq_f32_s32(x); }
  // Reinterprets bits as floats.
  static Floats as_floats(Ints x) { return vreinterpretq_f32_s32(x); }
  // Returns the bits of absolute values, which are ordered like the values.
  static Ints absolute(Floats x) { return vreinterpretq_s32_f32(vabsq_f32(x)); }

  // Converts 8-bit floats in four vectors, by way of float16.
  template <PointType type>
  static void small_floats(const uint8_t* p, Floats* found) {
    for (int i = 0; i < 2; ++i) {
      const uint8x8_t c = vld1_u8(p + 8 * i);
      uint16x8_t half = vshll_n_u8(c, 8);
      if constexpr (type == PointType::kE4M3) {
        // Exponents are 8 less than in float16: a unit is 256. The largest code is NaN:
        // a carry out of it sets the highest bit of the exponent.
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(c));
        half = vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(wide, 7)),
                         vdupq_n_u16(0xbf80));
        const uint16x8_t carry = vaddq_u16(half, vdupq_n_u16(0x80));
        half = vorrq_u16(half, vandq_u16(carry, vdupq_n_u16(0x4000)));
      }
      found[2 * i] = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(half)));
      found[2 * i + 1] = vcvt_high_f32_f16(vreinterpretq_f16_u16(half));
    }
  }

  // Lookups, which use the low four (or five) bits of an index and ignore the others.
  struct Table16 {
    uint8x16x4_t entries;
    explicit Table16(const float* p) {
      for (int i = 0; i < 4; ++i)
        entries.val[i] = vreinterpretq_u8_f32(vld1q_f32(p + 4 * i));
    }
    Floats operator[](Ints i) const {
      return vreinterpretq_f32_u8(vqtbl4q_u8(entries, places(both(i, 15))));
    }
  };
  struct Table32 {
    Table16 low, high;
    explicit Table32(const float* p) : low(p), high(p + 16) {}
    Floats operator[](Ints i) const {
      const uint8x16_t at = places(both(i, 31));
      // (An index beyond a table gives zero, or leaves the result unchanged.)
      return vreinterpretq_f32_u8(vqtbx4q_u8(vqtbl4q_u8(low.entries, at), high.entries,
                                             vsubq_u8(at, vdupq_n_u8(64))));
    }
  };
  struct Table256 {
    const float* entries;
    explicit Table256(const float* p) : entries(p) {}
    Floats operator[](Ints i) const {
      const auto at = [&](uint64_t lane) { return entries[lane & 0xffffffff]; };
      const uint64x2_t two = vreinterpretq_u64_s32(i);
      const uint64_t first = vgetq_lane_u64(two, 0), last = vgetq_lane_u64(two, 1);
      const float found[] = {at(first), at(first >> 32), at(last), at(last >> 32)};
      return load(found);
    }
  };

  // Digits of bytes, looked up in a table of 16 points.
  template <bool halves>
  using Planes = BytePlanes<halves>;
  template <class F>
  static void with_digit_points(const float* points, F f) {
    if (are_halves(points)) f(BytePlanes<true>(points));
    else f(BytePlanes<false>(points));
  }

  // Returns the scales of block `g` for `count` rows from row `i`.
  template <class Scales>
  static Floats scales(const Scales& w, int64_t g, int64_t i, int64_t count) {
    const int64_t at = w.shared ? g : w.order.place(g, i);
    const int64_t number = w.shared ? 1 : count;
    Floats found;
    if (w.scale_type == ScaleType::kFloat32) {
      found = load(static_cast<const float*>(w.scale) + at, number);
    } else if (bytes_of(w.scale_type) == 1) {
      const auto* from = static_cast<const uint8_t*>(w.scale) + at;
      found = byte_scales<Neon>(w, from, number);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(w.scale) + at;
      uint16_t copy[width] = {};
      if (number < width) {
        std::memcpy(copy, from, 2 * static_cast<size_t>(number));
        from = copy;
      }
      found = from_16_bits(vld1_u16(from), w.scale_type);
    }
    return w.shared ? vdupq_laneq_f32(found, 0) : found;
  }

 private:
  // Returns the places of the four bytes of each entry of a table.
  static uint8x16_t places(Ints i) {
    return u8(vmlaq_s32(ints(0x03020100), i, ints(0x04040404)));
  }
  // Interleaves bytes: of the lower eight lanes, and of the others.
  static uint16x8_t low_bytes(Ints first, Ints second) {
    return vreinterpretq_u16_u8(vzip1q_u8(u8(first), u8(second)));
  }
  static uint16x8_t high_bytes(Ints first, Ints second) {
    return vreinterpretq_u16_u8(vzip2q_u8(u8(first), u8(second)));
  }
};

}  // namespace
}  // namespace eqquant
