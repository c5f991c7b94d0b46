// What processors have. `build.py` lists the instruction sets that consist of it.
#pragma once

#include <cstdint>

namespace eqquant {

// Each is what a set adds to the one that it extends.
enum Feature : uint32_t {
  kAvx2 = 1 << 0,        // with FMA and F16C
  kAvxVnni = 1 << 1,     // integer products of 256 bits
  kAvx512 = 1 << 2,      // F, BW, VL, DQ and VNNI, which are integer products
  kAvx512Bf16 = 1 << 3,  // bfloat16 products
  kAmx = 1 << 4,         // tiles, of 8-bit integers and of bfloat16
  kNeon = 1 << 5,        // of 64-bit ARM: all of them have it
  kNeonDot = 1 << 6,     // products of 8-bit integers
  kNeonI8mm = 1 << 7,    // products of matrices of them
};

}  // namespace eqquant
