// Kernels for AVX2 with FMA and F16C: any x86-64 since 2013.
#include "bytes.h"
#include "float_kernels.h"
#include "kernels.h"
#include "nibbles.h"
#include "simd_avx2.h"

namespace eqquant {
namespace {

constexpr Kernels with_avx2() {
  Kernels found = float_kernels<Avx2>();
  found.bytes = multiply_bytes;
  return found;
}

}  // namespace

const Kernels avx2_kernels = with_avx2();

}  // namespace eqquant
