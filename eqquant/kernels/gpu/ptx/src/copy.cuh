// Copies bytes of a weight to registers.
#pragma once
#include "lane.cuh"

// The number of bytes that can be loaded at once at every multiple of `nbytes`.
ON_LANE constexpr int aligned(int nbytes) {
  return nbytes % 16 == 0 ? 16 : nbytes % 8 == 0 ? 8 : nbytes % 4 == 0 ? 4 : 2;
}

// Copies `nbytes` bytes by loads of `each` bytes, whose addresses are multiples of
// `each`. (Other loads read the same sectors of memory, so they stay in the cache.)
template <int nbytes, int each>
ON_LANE void copy(Word* to, const unsigned char* from) {
  EACH for (int i = 0; i < nbytes / each; ++i) {
    if constexpr (each == 2) {
      const Word two = load(reinterpret_cast<const unsigned short*>(from) + i);
      to[i / 2] = i % 2 == 0 ? two : to[i / 2] | two << 16;
    } else if constexpr (each == 4) {
      to[i] = load(reinterpret_cast<const Word*>(from) + i);
    } else if constexpr (each == 8) {
      const Words<2> two = load(reinterpret_cast<const Words<2>*>(from) + i);
      EACH for (int j = 0; j < 2; ++j) to[2 * i + j] = two.words[j];
    } else {
      const Vector four = load(reinterpret_cast<const Vector*>(from) + i);
      EACH for (int j = 0; j < 4; ++j) to[4 * i + j] = four.words[j];
    }
  }
}
