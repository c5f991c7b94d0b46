// Points of 4-bit codes as tables of 16 bytes, in which shuffles of bytes look them up.
#pragma once

#include <cstdint>
#include <cstring>

namespace eqquant {
namespace {

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Whether the lower two bytes of 16 points are zeros, as for small integers.
inline bool are_halves(const float* points) {
  for (int i = 0; i < 16; ++i)
    if (bits_of_float(points[i]) << 16 != 0) return false;
  return true;
}

// Returns a byte of each of 16 points; 0 is the lowest byte.
inline void byte_of_points(const float* points, int byte, uint8_t* found) {
  for (int i = 0; i < 16; ++i)
    found[i] = static_cast<uint8_t>(bits_of_float(points[i]) >> 8 * byte);
}

}  // namespace
}  // namespace eqquant
