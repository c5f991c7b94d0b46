// The types of stored numbers: scales of blocks, and points of codes.
#pragma once

#include <cmath>
#include <cstdint>

namespace eqquant {

// The bits of floats of 32, 16 or 8 bits. 8-bit scales are powers of two (`kE8M0`), or
// `float8_e4m3fn` (`kE4M3`), which is multiplied or divided by the factor of its
// matrix.
enum class ScaleType : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kE8M0 = 3,
  kE4M3 = 4,
  kE4M3Inverse = 5,
};

// The factor of `kE4M3`, in units of 256: the product of two numbers, so that no
// intermediate result is too large or too small.
struct Factor {
  float high, low;
};

// The points of codes: integers, entries of a table of 256, 8-bit floats with 3 or 2
// bits of mantissa (`float8_e4m3fn` and `float8_e5m2`), or signed 8-bit integers.
enum class PointType : int32_t {
  kIntegers = 0,
  kTable = 1,
  kE4M3 = 2,
  kE5M2 = 3,
  kSigned = 4,
};

namespace {

constexpr int64_t bytes_of(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat32: return 4;
    case ScaleType::kBfloat16:
    case ScaleType::kFloat16: return 2;
    default: return 1;
  }
}

constexpr bool has_factor(ScaleType type) { return type >= ScaleType::kE4M3; }

inline Factor factor_of(ScaleType type, float whole) {
  if (!has_factor(type)) return {};
  const bool inverse = type == ScaleType::kE4M3Inverse;
  const double all = 256 * (inverse ? 1 / double{whole} : double{whole});
  if (all == 0 || !std::isfinite(all)) return {static_cast<float>(all), 1};
  const double low = std::ldexp(1.0, std::ilogb(all) / 2);
  return {static_cast<float>(all / low), static_cast<float>(low)};
}

// Returns the first `count` of some one-byte scales.
template <class V, class Scales>
typename V::Floats byte_scales(const Scales& w, const uint8_t* from, int64_t count) {
  if (w.scale_type == ScaleType::kE8M0) {
    // The first power is subnormal, and the last is NaN: their mantissas have a bit.
    const auto e = V::template bytes<false>(from, count);
    const auto ends = V::minus(V::both(V::minus(e, V::ints(-1)), 0xfe), V::ints(1));
    return V::as_floats(V::either(V::template left<23>(e),
                                  V::both(V::template right<9>(ends), 1 << 22)));
  }
  // By way of float16, like `small_floats`.
  const auto c = V::template bytes<true>(from, count);
  const auto half = V::both(V::template left<7>(c), 0xbf80);
  const auto carry = V::both(V::minus(half, V::ints(-0x80)), 0x4000);
  const auto found = V::from_half(V::either(half, carry));
  return V::mul(V::mul(found, V::all(w.factor.high)), V::all(w.factor.low));
}

}  // namespace
}  // namespace eqquant
