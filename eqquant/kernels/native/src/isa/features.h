// Features of processors. `build.py` lists the instruction sets that consist of them.
#pragma once

#include <cstdint>

namespace eqquant {

// Each feature is the addition of a set to the set that it extends.
enum Feature : uint32_t {
  kAvx2 = 1 << 0,        // with FMA and F16C
  kAvxVnni = 1 << 1,     // integer products of 256 bits
  kAvx512 = 1 << 2,      // F, BW, VL, DQ and VNNI, which are integer products
  kAvx512Bf16 = 1 << 3,  // bfloat16 products
  kAmx = 1 << 4,         // tiles, of 8-bit integers and of bfloat16
  kNeon = 1 << 5,        // on all 64-bit ARM processors
  kNeonDot = 1 << 6,     // products of 8-bit integers
  kNeonI8mm = 1 << 7,    // products of matrices of 8-bit integers
};

}  // namespace eqquant
