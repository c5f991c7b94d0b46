// The features of this processor.
#pragma once

#include <cstdint>

#ifdef __aarch64__
#include "isa/here_arm.h"
#else
#include "isa/here_x86.h"
#endif

namespace eqquant {
namespace {

// Determined once, since Linux may answer differently later.
inline uint32_t features_here() {
  static const uint32_t found = find_features();
  return found;
}

}  // namespace
}  // namespace eqquant
