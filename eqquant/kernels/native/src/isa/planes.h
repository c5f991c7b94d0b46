// Points of 4-bit codes, byte by byte: tables of 16 bytes, which shuffles of bytes look
// up.
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

// Whether the lower two bytes of 16 points are zeros, as they are of small integers.
inline bool are_halves(const float* points) {
  for (int i = 0; i < 16; ++i)
    if (bits_of_float(points[i]) << 16 != 0) return false;
  return true;
}

// A byte of each of 16 points, 0 the lowest.
inline void byte_of_points(const float* points, int byte, uint8_t* found) {
  for (int i = 0; i < 16; ++i)
    found[i] = static_cast<uint8_t>(bits_of_float(points[i]) >> 8 * byte);
}

}  // namespace
}  // namespace eqquant
