// Kernels for AVX512 with 8-bit integer products (VNNI), and the tables of the two
// instruction sets that extend it.
#include "decoded.h"
#include "decoded_integers.h"
#include "decoded_transposed.h"
#include "digits.h"
#include "few_integers.h"
#include "forward.h"
#include "integers.h"
#include "kernels.h"
#include "mend.h"
#include "row_parts.h"
#include "simd_avx512.h"
#include "transposed.h"

namespace eqquant {

const Kernels avx512_kernels = {
    forward_scratch,
    forward<Avx512>,
    transposed<Avx512>,
    mend<Avx512>,
    mend_transposed<Avx512>,
    to_digits,
    integers_scratch<IntegersInRegisters>,
    integers<IntegersInRegisters>,
    nullptr,
    nullptr,
    nullptr,
    decoded_scratch<Avx512>,
    decoded<Avx512>,
    decoded_transposed<Avx512>,
    nullptr,
    nullptr,
    to_words,
    decoded_integers_scratch,
    decoded_integers,
    has_fours,
    to_parts,
    few_integers_scratch,
    few_integers,
};

const Kernels avx512_bf16_kernels = {
    forward_scratch,
    forward<Avx512>,
    transposed<Avx512>,
    mend<Avx512>,
    mend_transposed<Avx512>,
    to_digits,
    integers_scratch<IntegersInRegisters>,
    integers<IntegersInRegisters>,
    nullptr,
    avx512_bf16::bfloat16_scratch,
    avx512_bf16::bfloat16,
    decoded_scratch<Avx512>,
    decoded<Avx512>,
    decoded_transposed<Avx512>,
    avx512_bf16::decoded_bfloat16_scratch,
    avx512_bf16::decoded_bfloat16,
    to_words,
    decoded_integers_scratch,
    decoded_integers,
    has_fours,
    to_parts,
    few_integers_scratch,
    few_integers,
};

const Kernels amx_kernels = {
    forward_scratch,
    forward<Avx512>,
    transposed<Avx512>,
    mend<Avx512>,
    mend_transposed<Avx512>,
    to_digits,
    amx::integers_scratch,
    amx::integers,
    nullptr,
    amx::bfloat16_scratch,
    amx::bfloat16,
    decoded_scratch<Avx512>,
    decoded<Avx512>,
    decoded_transposed<Avx512>,
    amx::decoded_bfloat16_scratch,
    amx::decoded_bfloat16,
    to_words,
    decoded_integers_scratch,
    decoded_integers,
    has_fours,
    to_parts,
    few_integers_scratch,
    few_integers,
};

}  // namespace eqquant
