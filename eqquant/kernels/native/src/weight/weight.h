// The weights that kernels multiply by.
#pragma once

#include <cstdint>
#include <type_traits>

#include "isa/basics.h"
#include "isa/number_types.h"
#include "isa/row_order.h"
#include "weight/gguf.h"

namespace eqquant {

// How codes are packed in a byte. The first code is the lowest digit.
enum class Codes : int32_t {
  kInt8 = 0,      // a signed integer
  kNibbles = 1,   // two digits of base 16
  kQuarters = 2,  // four digits of base 4
  kTrits = 3,     // five digits of base 3
  kBits = 4,      // eight digits of base 2
};

namespace {

constexpr int64_t codes_per_byte(Codes codes) {
  switch (codes) {
    case Codes::kInt8: return 1;
    case Codes::kNibbles: return 2;
    case Codes::kQuarters: return 4;
    case Codes::kTrits: return 5;
    case Codes::kBits: return 8;
  }
  return 0;
}

// Calls `f` with the kind as a compile-time constant.
template <class F>
void with_kind(Codes kind, F f) {
  switch (kind) {
    case Codes::kInt8: return f(std::integral_constant<Codes, Codes::kInt8>());
    case Codes::kNibbles: return f(std::integral_constant<Codes, Codes::kNibbles>());
    case Codes::kQuarters: return f(std::integral_constant<Codes, Codes::kQuarters>());
    case Codes::kTrits: return f(std::integral_constant<Codes, Codes::kTrits>());
    case Codes::kBits: return f(std::integral_constant<Codes, Codes::kBits>());
  }
}

// The least number of bytes that has a multiple of four codes.
constexpr int64_t bytes_of_fours(Codes codes) {
  return codes_per_byte(codes) % 4 == 0 ? 1 : codes_per_byte(codes) == 2 ? 2 : 4;
}

// The number of codes in some bytes, rounded up to whole fours of codes. (Integer
// products take four codes at a time.)
constexpr int64_t codes_of(Codes codes, int64_t bytes) {
  const int64_t step = bytes_of_fours(codes);
  return divided_up(bytes, step) * step * codes_per_byte(codes);
}

}  // namespace

// A weight of `n` rows. Byte `b` of row `i` is at `codes[b * n + i]`: the contracted
// axis is first, so that a vector load takes the same byte of consecutive rows. Each
// `block` bytes of a row share a scale, and optionally a zero-point. A row has `blocks`
// of these, the last of which may be shorter.
struct Weight {
  Codes kind;
  const uint8_t* codes;
  int64_t bytes;
  int64_t n;
  int64_t block;
  int64_t blocks;
  ScaleType scale_type;
  const void* scale;
  RowOrder order;  // of the scales
  bool shared;     // by all rows: then there are only those of the first
  Factor factor;   // of the scales, if their type has one
  const uint8_t* zero;    // at `g * n + i`; null if there are none; for nibbles only
  const float* points;    // a table of the 16 points of the digits; unused by `kInt8`
  int32_t offset;         // the code that stands for zero, if there are no zero-points
  int64_t used;           // how many digits of each byte, from the first, are codes
  int64_t k;              // how many codes a row has; digits beyond meet zero inputs
};

// How the codes of `Blocks` are packed: a stream of codes of so many bits, or of digits
// of base 3, five in a byte; or as in GGUF's types, with their scales.
enum class Packing : int32_t {
  kTrits = 0,
  kBits1 = 1,
  kBits2,
  kBits3,
  kBits4,
  kBits5,
  kBits6,
  kBits7,
  kBits8,
#define EQQUANT_PACKING(name) k##name,
  EQQUANT_GGUF_TYPES(EQQUANT_PACKING)
#undef EQQUANT_PACKING
};

constexpr bool is_gguf(Packing packing) { return packing > Packing::kBits8; }

// The `what` of one of GGUF's types, a case for each; `none` for other packings.
#define EQQUANT_OF_GGUF(what, none) \
  switch (packing) {                \
    EQQUANT_GGUF_TYPES(what)        \
    default: return none;           \
  }

// The number of codes in a block of a type, and of bytes. 0 for others.
constexpr int64_t block_codes(Packing packing) {
#define EQQUANT_PACKING(name) \
  case Packing::k##name: return gguf::name::kSlices * gguf::name::kCodes;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, 0)
#undef EQQUANT_PACKING
}
constexpr int64_t block_bytes(Packing packing) {
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kBytes;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, 0)
#undef EQQUANT_PACKING
}

// The number of bits of a code. (Digits of base 3 have fewer than two.)
constexpr int64_t bits_of(Packing packing) {
  if (packing == Packing::kTrits) return 2;
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kBits;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, static_cast<int64_t>(packing))
#undef EQQUANT_PACKING
}

// Whether the codes of a type are points of a table.
constexpr bool has_table(Packing packing) {
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kTable;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, false)
#undef EQQUANT_PACKING
}

// The number of points that a packing may index; 0 if it has no codebook.
constexpr int64_t codebook_points(Packing packing) {
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kPoints;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, 0)
#undef EQQUANT_PACKING
}

// What scales are to be multiplied by, in units of which codes are integers.
constexpr float unit_of(Packing packing) {
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kUnit;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, 1)
#undef EQQUANT_PACKING
}

// What a block has beside its scale: see `AbstractGrid.offset`.
enum class Offset : int32_t { kNone = 0, kZeroPoint = 1, kMinimum = 2 };

// A float for each block of each row: these as in `Weight`.
struct BlockFloats {
  ScaleType scale_type;
  const void* scale;
  RowOrder order;
  bool shared;
  Factor factor;
};

// A weight of `n` rows and `k` columns, as `Weight`, but of any format of blocks: its
// numbers are `(point - zero_point) * scale` or `point * scale + minimum`.
struct Blocks {
  Packing packing;
  const uint8_t* bytes;
  RowOrder of_bytes;
  int64_t n, k;
  // How many codes share a scale. Types of GGUF use neither this nor the scales and
  // minima below.
  int64_t block;
  BlockFloats scales;
  Offset offset;
  const uint8_t* zero_points;
  RowOrder of_blocks;  // the order of the zero-points
  BlockFloats minima;
  PointType point_type;
  int32_t base;         // of integers: the code that stands for zero
  const float* points;  // the table
  // Of types with a codebook: the levels of its points, the first the lowest. As many
  // as their indices can be; null for other types.
  const uint16_t* codebook;

  // Byte `b` of row `i`, and how far the next one is.
  EQQUANT_INLINE const uint8_t* at(int64_t b, int64_t i) const {
    return bytes + of_bytes.place(b, i);
  }
  EQQUANT_INLINE int64_t stride() const { return of_bytes.stride; }
  EQQUANT_INLINE bool in_panels() const { return of_bytes.panel != kPanelRows; }
};

}  // namespace eqquant
