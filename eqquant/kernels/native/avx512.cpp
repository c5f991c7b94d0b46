// Kernels for AVX512 with products of 8-bit integers (VNNI).
#include "forward.h"
#include "integers.h"
#include "kernels.h"
#include "simd_avx512.h"
#include "transposed.h"

namespace eqquant {

const Kernels avx512_kernels = {
    forward_scratch, forward<Avx512>,  transposed<Avx512>,
    to_digits,       integers_scratch, integers,
    nullptr,         nullptr,
};

}  // namespace eqquant
