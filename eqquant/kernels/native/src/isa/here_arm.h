// The features of a 64-bit ARM processor, as reported by the system.
#pragma once

#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#include <cstddef>
#include <cstdint>

#include "isa/features.h"

namespace eqquant {
namespace {

#ifdef __APPLE__
inline bool has_feature(const char* name) {
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
}
inline bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
// HWCAP_ASIMDDP and HWCAP2_I8MM
inline bool has_dot_products() { return (getauxval(AT_HWCAP) & 1u << 20) != 0; }
inline bool has_matrices() { return (getauxval(AT_HWCAP2) & 1u << 13) != 0; }
#endif

inline uint32_t find_features() {
  return kNeon | (has_dot_products() ? kNeonDot : 0u) |
         (has_matrices() ? kNeonI8mm : 0u);
}

}  // namespace
}  // namespace eqquant
