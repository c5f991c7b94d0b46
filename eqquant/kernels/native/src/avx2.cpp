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

const Kernels avx2_kernels = {
    forward_scratch,
    forward<Avx2>,
    transposed<Avx2>,
    mend<Avx2>,
    mend_transposed<Avx2>,
    nullptr,
    nullptr,
    nullptr,
    multiply_bytes,
    nullptr,
    nullptr,
    decoded_scratch<Avx2>,
    decoded<Avx2>,
    decoded_transposed<Avx2>,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace eqquant
