// The instruction set of the machine.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace eqquant {
namespace {

// The instruction sets, each of which includes those before it.
enum Level : int32_t { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// Whether the CPU has AMX with 8-bit integers and bfloat16, and Linux permits this
// process to use it: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA.
inline bool may_use_tiles() {
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & wanted) == wanted &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

inline Level find_level() {
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  __builtin_cpu_init();
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return kNone;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vnni"))
    return kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return kAvx512;
  return may_use_tiles() ? kAmx : kAvx512Bf16;
}

// Determined once, since Linux may answer differently later.
inline Level level_of_machine() {
  static const Level found = find_level();
  return found;
}

}  // namespace
}  // namespace eqquant
