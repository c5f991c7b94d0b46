// Additions to `isa/avx2.h` for `arrays/`. `isa/neon_arrays.h` has the same interface.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx2.h"

namespace eqquant {
namespace {

struct Avx2Arrays : Avx2 {
  struct Bytes : Bytes256 {
    // Loads sixteen bytes of a row and of the row 16 further, from byte `at` on.
    static Vector load_sixteen(const uint8_t* const* rows, int64_t at) {
      const auto load = [&](int row) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + at));
      };
      return _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(16), 1);
    }
    // Shifts pairs of bytes: bits move into the neighbouring byte.
    static Vector right(Vector x, int bits) {
      return _mm256_srl_epi16(x, _mm_cvtsi32_si128(bits));
    }
    static Vector left(Vector x, int bits) {
      return _mm256_sll_epi16(x, _mm_cvtsi32_si128(bits));
    }
    // Interleaves the bytes of two vectors: of the lower halves of their 16 bytes, of
    // the upper halves, and of all.
    static Vector zip_low(Vector x, Vector y) { return _mm256_unpacklo_epi8(x, y); }
    static Vector zip_high(Vector x, Vector y) { return _mm256_unpackhi_epi8(x, y); }
    static void zip(Vector x, Vector y, Vector* two) {
      const Vector low = zip_low(x, y), high = zip_high(x, y);
      two[0] = _mm256_permute2x128_si256(low, high, 0x20);
      two[1] = _mm256_permute2x128_si256(low, high, 0x31);
    }
    // Stores past the caches.
    static void stream(uint8_t* p, Vector x) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x);
    }
    static void end_of_stream() { _mm_sfence(); }
  };

  // Return the smaller and the larger number; `y` if they are not ordered.
  static Floats min(Floats x, Floats y) { return _mm256_min_ps(x, y); }
  static Floats max(Floats x, Floats y) { return _mm256_max_ps(x, y); }
  static Floats magnitude(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
  static Floats negative(Floats x) { return _mm256_xor_ps(all(-0.0f), x); }
  // Copies the sign of the second number to the first, if it is negative.
  static Floats with_sign(Floats x, Floats y) {
    return _mm256_or_ps(x, _mm256_and_ps(all(-0.0f), y));
  }
  static Floats sqrt(Floats x) { return _mm256_sqrt_ps(x); }

  static Mask above(Floats x, Floats y) { return compared<_CMP_GT_OQ>(x, y); }
  static Mask not_below(Floats x, Floats y) { return compared<_CMP_GE_OQ>(x, y); }
  static Mask equal(Floats x, Floats y) { return compared<_CMP_EQ_OQ>(x, y); }
  static Mask common(Mask x, Mask y) { return {_mm256_and_si256(x.of, y.of)}; }
  // Returns `x` where the mask is set, and `y` elsewhere; or zero where it is set.
  static Floats where(Mask mask, Floats x, Floats y) {
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(mask.of));
  }
  static Floats zero_where(Mask mask, Floats x) {
    return _mm256_andnot_ps(_mm256_castsi256_ps(mask.of), x);
  }

  static Ints min(Ints x, Ints y) { return _mm256_min_epi32(x, y); }
  using Avx2::max;
  // Reinterprets floats as their bits.
  static Ints as_ints(Floats x) { return _mm256_castps_si256(x); }

  // Lookups, by the low three bits of an index.
  struct Table8 {
    Floats entries;
    explicit Table8(const float* p) : entries(load(p)) {}
    Floats operator[](Ints i) const { return _mm256_permutevar8x32_ps(entries, i); }
  };

  // Stores the lowest byte of each number.
  static void store_low_bytes(uint8_t* p, Ints x) {
    x = both(x, 255);
    const __m128i pairs = narrow(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
  }

  // Loads numbers of 16 bits, and stores the nearest float16s.
  static Floats load_16_bits(const uint16_t* p, bool float16) {
    return from_16_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                        float16 ? ScaleType::kFloat16 : ScaleType::kBfloat16);
  }
  static void store_halves(uint16_t* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }

  // Transposes as many vectors as each has numbers.
  static void transpose(Floats* x) {
    Floats a[8], b[8];
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      a[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) {
        b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0x44);
        b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0xee);
      }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
      x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
  }

  // The control register of floating-point arithmetic, and its bits that flush
  // subnormal numbers to zero.
  using Control = uint32_t;
  static constexpr Control no_subnormals = 0x8040;
  static Control control() { return _mm_getcsr(); }
  static void set_control(Control x) { _mm_setcsr(x); }

 private:
  template <int how>
  static Mask compared(Floats x, Floats y) {
    return {_mm256_castps_si256(_mm256_cmp_ps(x, y, how))};
  }
};

}  // namespace
}  // namespace eqquant
