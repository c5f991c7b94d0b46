// Kernels for AVX2 with FMA and F16C: any x86-64 since 2013.
#include "bytes.h"
#include "decoded.h"
#include "decoded_transposed.h"
#include "forward.h"
#include "kernels.h"
#include "mend.h"
#include "nibbles.h"
#include "simd_avx2.h"
#include "transposed.h"

namespace eqquant {
namespace {

constexpr Kernels with_avx2() {
  Kernels found = {};
  found.forward_scratch = forward_scratch;
  found.forward = forward<Avx2>;
  found.transposed = transposed<Avx2>;
  found.mend = mend<Avx2>;
  found.mend_transposed = mend_transposed<Avx2>;
  found.bytes = multiply_bytes;
  found.decoded_scratch = decoded_scratch<Avx2>;
  found.decoded = decoded<Avx2>;
  found.decoded_transposed = decoded_transposed<Avx2>;
  return found;
}

}  // namespace

const Kernels avx2_kernels = with_avx2();

}  // namespace eqquant
