// Kernels for AVX512 with products of bfloat16.
#include "bfloat16.h"
#include "forward.h"
#include "integers.h"
#include "kernels.h"
#include "simd_avx512.h"
#include "transposed.h"

namespace eqquant {

const Kernels avx512_bf16_kernels = {
    forward_scratch,  forward<Avx512>, transposed<Avx512>, to_digits,
    integers_scratch, integers,        bfloat16_scratch,   bfloat16,
};

}  // namespace eqquant
