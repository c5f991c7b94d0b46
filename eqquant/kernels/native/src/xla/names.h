// The numbers that Python looks up by name, so that it needs no copy of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "products/kernels.h"

namespace eqquant {
namespace {

struct Named {
  const char* name;
  int32_t number;
};

template <class T>
constexpr Named named(const char* name, T number) {
  return {name, static_cast<int32_t>(number)};
}

constexpr Named kNames[] = {
    named("few_part_rows", kFewPartRows),
    named("offset.None", Offset::kNone),
    named("offset.minimum", Offset::kMinimum),
    named("offset.zero_point", Offset::kZeroPoint),
    named("packing.trits", Packing::kTrits),
    named("packing.1", Packing::kBits1),
    named("packing.2", Packing::kBits2),
    named("packing.3", Packing::kBits3),
    named("packing.4", Packing::kBits4),
    named("packing.5", Packing::kBits5),
    named("packing.6", Packing::kBits6),
    named("packing.7", Packing::kBits7),
    named("packing.8", Packing::kBits8),
#define EQQUANT_PACKING(name) named("packing." #name, Packing::k##name),
    EQQUANT_GGUF_TYPES(EQQUANT_PACKING)
#undef EQQUANT_PACKING
#define EQQUANT_PRODUCT(name) named("product." #name, Product::name),
        EQQUANT_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
#define EQQUANT_PRODUCT(name) named("product." #name, TrellisProduct::name),
            EQQUANT_TRELLIS_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
                named("points.e4m3", PointType::kE4M3),
    named("points.e5m2", PointType::kE5M2),
    named("points.integers", PointType::kIntegers),
    named("points.signed", PointType::kSigned),
    named("points.table", PointType::kTable),
    named("scale.bfloat16", ScaleType::kBfloat16),
    named("scale.float16", ScaleType::kFloat16),
    named("scale.float32", ScaleType::kFloat32),
    named("scale.float8_e4m3fn", ScaleType::kE4M3),
    named("scale.float8_e4m3fn.inverse", ScaleType::kE4M3Inverse),
    named("scale.float8_e8m0fnu", ScaleType::kE8M0),
};

// Returns the number with this name, or -1.
inline int32_t number_of(const char* name) {
  for (const Named& known : kNames)
    if (std::strcmp(known.name, name) == 0) return known.number;
  return -1;
}

}  // namespace
}  // namespace eqquant
