// The weights that kernels multiply by.
#pragma once

#include <cstdint>
#include <type_traits>

#include "isa/basics.h"
#include "isa/number_types.h"
#include "isa/row_order.h"
#include "weight/gguf.h"

namespace eqquant {

// The packing of codes: a stream of codes of a number of bits, or of base-3 digits,
// five to a byte; or GGUF types, with their scales.
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
#define EQQUANT_PACKING(name) +1
constexpr int32_t kPackings = 9 EQQUANT_GGUF_TYPES(EQQUANT_PACKING);
#undef EQQUANT_PACKING

constexpr bool is_gguf(Packing packing) { return packing > Packing::kBits8; }

// A switch with a case `what` for each GGUF type; `none` for other packings.
#define EQQUANT_OF_GGUF(what, none) \
  switch (packing) {                \
    EQQUANT_GGUF_TYPES(what)        \
    default: return none;           \
  }

// Returns the number of codes in a block of a type, or of bytes. 0 for other packings.
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

// Returns the number of codes in a byte, the first of which is its lowest digit; 0 if a
// byte does not hold whole codes.
constexpr int64_t codes_per_byte(Packing packing) {
  switch (packing) {
    case Packing::kTrits: return 5;
    case Packing::kBits1: return 8;
    case Packing::kBits2: return 4;
    case Packing::kBits4: return 2;
    case Packing::kBits8: return 1;
    default: return 0;
  }
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

// Returns the factor of scales, in units of which codes are integers.
constexpr float unit_of(Packing packing) {
#define EQQUANT_PACKING(name) case Packing::k##name: return gguf::name::kUnit;
  EQQUANT_OF_GGUF(EQQUANT_PACKING, 1)
#undef EQQUANT_PACKING
}

// The parameter of a block besides its scale: see `AbstractGrid.offset`.
enum class Offset : int32_t { kNone = 0, kZeroPoint = 1, kMinimum = 2 };

// A float for each block of each row, or for each block of all rows.
struct BlockFloats {
  ScaleType scale_type;
  const void* scale;
  RowOrder order;
  bool shared;    // by all rows: then only the first row is stored
  Factor factor;  // if the type has one
};

// The sizes of rows and blocks in bytes, if bytes hold whole codes: the numbers of
// bytes of a row and of a block, and the number of blocks of a row, the last of which
// may be shorter.
struct InBytes {
  int64_t row, block, blocks;

  static constexpr InBytes of(Packing packing, int64_t block, int64_t k) {
    const int64_t per = codes_per_byte(packing);
    if (per == 0) return {0, 0, 0};
    const int64_t row = divided_up(k, per),
                  whole = smaller(divided_up(block, per), row);
    return {row, whole, divided_up(row, whole)};
  }
};

// A weight of `n` rows and `k` columns, in any format of blocks: its numbers are
// `(point - zero_point) * scale` or `point * scale + minimum`. The contracted axis is
// first in memory, so that a vector load takes the same byte of consecutive rows.
struct Blocks {
  Packing packing;
  const uint8_t* bytes;
  RowOrder of_bytes;
  int64_t n, k;
  // The number of codes that share a scale. GGUF types use neither this nor the scales
  // and minima below.
  int64_t block;
  InBytes in_bytes;
  BlockFloats scales;
  Offset offset;
  const uint8_t* zero_points;  // null if there are none
  RowOrder of_blocks;          // the order of the zero-points
  BlockFloats minima;
  PointType point_type;
  int32_t base;         // of integers: the code that stands for zero
  const float* points;  // the table, of 256
  // For types with a codebook, the levels of its points, the first the lowest, for
  // every possible index; null for other types.
  const uint16_t* codebook;

  // Returns byte `b` of row `i`; the next byte is `stride()` further.
  EQQUANT_INLINE const uint8_t* at(int64_t b, int64_t i) const {
    return bytes + of_bytes.place(b, i);
  }
  EQQUANT_INLINE int64_t stride() const { return of_bytes.stride; }
  EQQUANT_INLINE bool in_panels() const { return of_bytes.panel != kPanelRows; }
};

namespace {

// Calls `f` with a packing whose bytes hold whole codes as a compile-time constant.
template <class F>
void with_whole_bytes(Packing packing, F f) {
  switch (packing) {
#define EQQUANT_PACKING(name) \
  case Packing::k##name: return f(std::integral_constant<Packing, Packing::k##name>());
    EQQUANT_PACKING(Trits)
    EQQUANT_PACKING(Bits1)
    EQQUANT_PACKING(Bits2)
    EQQUANT_PACKING(Bits4)
    EQQUANT_PACKING(Bits8)
#undef EQQUANT_PACKING
    default: return;
  }
}

// The least number of bytes whose number of codes is a multiple of four.
constexpr int64_t bytes_of_fours(Packing packing) {
  return codes_per_byte(packing) % 4 == 0 ? 1 : codes_per_byte(packing) == 2 ? 2 : 4;
}

// Returns the number of codes in some bytes, rounded up to whole fours of codes.
// (Integer products take four codes at a time.)
constexpr int64_t codes_of(Packing packing, int64_t bytes) {
  const int64_t step = bytes_of_fours(packing);
  return divided_up(bytes, step) * step * codes_per_byte(packing);
}

}  // namespace
}  // namespace eqquant
