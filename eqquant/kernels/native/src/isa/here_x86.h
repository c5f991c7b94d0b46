// The features of an x86-64 processor.
#pragma once

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

#include "isa/features.h"

namespace eqquant {
namespace {

struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;

  Cpuid(unsigned leaf, unsigned subleaf) {
    __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d);
  }
};

// Whether the CPU has AMX with 8-bit integers and bfloat16, and Linux permits this
// process to use it: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. (Other systems are not
// asked.)
inline bool may_use_tiles() {
#ifdef __linux__
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
  return (Cpuid(7, 0).d & wanted) == wanted &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

// The registers that the system saves for each thread, by their bits in XCR0.
inline uint32_t saved_registers() {
  if ((Cpuid(1, 0).c & bit_OSXSAVE) == 0) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// (Uses the instruction itself: on Windows, `__builtin_cpu_supports` of ziglang finds
// no features.)
inline uint32_t find_features() {
  const Cpuid basic(1, 0), extended(7, 0), more(7, 1);
  const uint32_t saved = saved_registers();
  const auto has = [](uint32_t found, uint32_t all) { return (found & all) == all; };
  constexpr uint32_t of_avx2 = 0x06, of_avx512 = 0xe6;
  uint32_t found = 0;
  if (!has(saved, of_avx2)) return found;
  if (has(basic.c, bit_F16C | bit_FMA) && has(extended.b, bit_AVX2)) found |= kAvx2;
  if (has(more.a, 1u << 4)) found |= kAvxVnni;
  if (!has(saved, of_avx512)) return found;
  if (has(extended.b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) &&
      has(extended.c, 1u << 11))
    found |= kAvx512;
  if (has(more.a, 1u << 5)) found |= kAvx512Bf16;
  if (may_use_tiles()) found |= kAmx;
  return found;
}

}  // namespace
}  // namespace eqquant
