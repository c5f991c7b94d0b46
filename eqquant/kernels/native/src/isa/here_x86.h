// What x86-64 processors have.
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
// process to use it: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. (Elsewhere, no system
// is asked.)
inline bool may_use_tiles() {
#ifdef __linux__
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
  return (Cpuid(7, 0).d & wanted) == wanted &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

inline uint32_t find_features() {
  __builtin_cpu_init();
  uint32_t found = 0;
  if ((Cpuid(1, 0).c & bit_F16C) != 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    found |= kAvx2;
  if ((Cpuid(7, 1).a & 1u << 4) != 0) found |= kAvxVnni;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    found |= kAvx512;
  if (__builtin_cpu_supports("avx512bf16")) found |= kAvx512Bf16;
  if (may_use_tiles()) found |= kAmx;
  return found;
}

}  // namespace
}  // namespace eqquant
