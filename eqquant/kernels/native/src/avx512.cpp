// Kernels for AVX512 with 8-bit integer products (VNNI), and the tables of the two
// instruction sets that extend it.
#include "decoded_integers.h"
#include "digits.h"
#include "few_integers.h"
#include "float_kernels.h"
#include "integers.h"
#include "kernels.h"
#include "row_parts.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

constexpr Kernels with_avx512() {
  Kernels found = float_kernels<Avx512>();
  found.to_digits = to_digits;
  found.integers_scratch = integers_scratch<IntegersInRegisters>;
  found.integers = integers<IntegersInRegisters>;
  found.to_words = to_words;
  found.decoded_integers_scratch = decoded_integers_scratch;
  found.decoded_integers = decoded_integers;
  found.has_fours = has_fours;
  found.to_parts = to_parts;
  found.few_integers_scratch = few_integers_scratch;
  found.few_integers = few_integers;
  return found;
}

constexpr Kernels with_bfloat16() {
  Kernels found = with_avx512();
  found.bfloat16_scratch = avx512_bf16::bfloat16_scratch;
  found.bfloat16 = avx512_bf16::bfloat16;
  found.decoded_bfloat16_scratch = avx512_bf16::decoded_bfloat16_scratch;
  found.decoded_bfloat16 = avx512_bf16::decoded_bfloat16;
  return found;
}

constexpr Kernels with_amx() {
  Kernels found = with_avx512();
  found.integers_scratch = amx::integers_scratch;
  found.integers = amx::integers;
  found.bfloat16_scratch = amx::bfloat16_scratch;
  found.bfloat16 = amx::bfloat16;
  found.decoded_bfloat16_scratch = amx::decoded_bfloat16_scratch;
  found.decoded_bfloat16 = amx::decoded_bfloat16;
  return found;
}

}  // namespace

const Kernels avx512_kernels = with_avx512();
const Kernels avx512_bf16_kernels = with_bfloat16();
const Kernels amx_kernels = with_amx();

}  // namespace eqquant
