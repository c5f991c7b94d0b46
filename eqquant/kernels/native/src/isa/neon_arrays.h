// Additions to `isa/neon.h` for `arrays/`: the interface of `isa/avx2_arrays.h`.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "isa/neon.h"

namespace eqquant {
namespace {

struct NeonArrays : Neon {
  struct Bytes : Bytes128 {
    // Loads sixteen bytes of a row, from byte `at` on.
    static Vector load_sixteen(const uint8_t* const* rows, int64_t at) {
      return load(rows[0] + at);
    }
    static Vector right(Vector x, int bits) { return left(x, -bits); }
    static Vector left(Vector x, int bits) {
      return any(vshlq_u8(u8(x), vdupq_n_s8(static_cast<int8_t>(bits))));
    }
    // Interleaves the bytes of two vectors: of their lower halves, of their upper
    // halves, and of all.
    static Vector zip_low(Vector x, Vector y) { return any(vzip1q_u8(u8(x), u8(y))); }
    static Vector zip_high(Vector x, Vector y) { return any(vzip2q_u8(u8(x), u8(y))); }
    static void zip(Vector x, Vector y, Vector* two) {
      two[0] = zip_low(x, y);
      two[1] = zip_high(x, y);
    }
    static void stream(uint8_t* p, Vector x) { store(p, x); }
    static void end_of_stream() {}
  };

  // Return the smaller and the larger number; `y` if they are not ordered.
  static Floats min(Floats x, Floats y) { return where(above(y, x), x, y); }
  static Floats max(Floats x, Floats y) { return where(above(x, y), x, y); }
  static Floats magnitude(Floats x) { return vabsq_f32(x); }
  static Floats negative(Floats x) { return vnegq_f32(x); }
  // Copies the sign of the second number to the first, if it is negative.
  static Floats with_sign(Floats x, Floats y) {
    return as_floats(either(as_ints(x), both(as_ints(y), INT32_MIN)));
  }
  static Floats sqrt(Floats x) { return vsqrtq_f32(x); }

  static Mask above(Floats x, Floats y) { return {vcgtq_f32(x, y)}; }
  static Mask not_below(Floats x, Floats y) { return {vcgeq_f32(x, y)}; }
  static Mask equal(Floats x, Floats y) { return {vceqq_f32(x, y)}; }
  static Mask common(Mask x, Mask y) { return {vandq_u32(x.of, y.of)}; }
  // Returns `x` where the mask is set, and `y` elsewhere; or zero where it is set.
  static Floats where(Mask mask, Floats x, Floats y) {
    return vbslq_f32(mask.of, x, y);
  }
  static Floats zero_where(Mask mask, Floats x) {
    return as_floats(any(vbicq_u32(vreinterpretq_u32_f32(x), mask.of)));
  }

  static Ints min(Ints x, Ints y) { return vminq_s32(x, y); }
  using Neon::max;
  // Reinterprets floats as their bits.
  static Ints as_ints(Floats x) { return vreinterpretq_s32_f32(x); }

  // Lookups of indices below 8.
  struct Table8 {
    Table16 entries;
    explicit Table8(const float* p) : entries(twice(p).of) {}
    Floats operator[](Ints i) const { return entries[i]; }

   private:
    struct Twice {
      float of[16];
    };
    static Twice twice(const float* p) {
      Twice found;
      for (int i = 0; i < 16; ++i) found.of[i] = p[i % 8];
      return found;
    }
  };

  // Stores the lowest byte of each number.
  static void store_low_bytes(uint8_t* p, Ints x) {
    const uint16x4_t words = vmovn_u32(u32(x));
    uint8_t bytes[8];
    vst1_u8(bytes, vmovn_u16(vcombine_u16(words, words)));
    std::memcpy(p, bytes, 4);
  }

  // Loads numbers of 16 bits, and stores the nearest float16s.
  static Floats load_16_bits(const uint16_t* p, bool float16) {
    return from_16_bits(vld1_u16(p),
                        float16 ? ScaleType::kFloat16 : ScaleType::kBfloat16);
  }
  static void store_halves(uint16_t* p, Floats x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }

  // Transposes as many vectors as each has numbers.
  static void transpose(Floats* x) {
    const float32x4_t a = vzip1q_f32(x[0], x[2]), b = vzip2q_f32(x[0], x[2]);
    const float32x4_t c = vzip1q_f32(x[1], x[3]), d = vzip2q_f32(x[1], x[3]);
    x[0] = vzip1q_f32(a, c), x[1] = vzip2q_f32(a, c);
    x[2] = vzip1q_f32(b, d), x[3] = vzip2q_f32(b, d);
  }

  // The control register of floating-point arithmetic, and its bit that flushes
  // subnormal numbers to zero.
  using Control = uint64_t;
  static constexpr Control no_subnormals = 1 << 24;
  static Control control() {
    Control found;
    asm volatile("mrs %0, fpcr" : "=r"(found));
    return found;
  }
  static void set_control(Control x) { asm volatile("msr fpcr, %0" : : "r"(x)); }
};

}  // namespace
}  // namespace eqquant
