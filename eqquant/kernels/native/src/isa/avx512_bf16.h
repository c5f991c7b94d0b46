// Vectors of sixteen numbers, and products of pairs of bfloat16 (AVX512_BF16).
#pragma once

#include "isa/avx512.h"

namespace eqquant {
namespace {

struct Avx512Bf16 : Avx512 {};

}  // namespace
}  // namespace eqquant
