// The operands of the kernels, and the table of kernels that each instruction set
// fills.
#pragma once

#include <cstdint>
#include <type_traits>

#include "row_order.h"
#include "scales.h"

// Unrolls a loop with a constant trip count, so that small arrays stay in registers.
#define EQQUANT_UNROLL _Pragma("GCC unroll 32")
// After a loop that accumulates into `x`: otherwise GCC also stores it in each
// iteration.
#define EQQUANT_ADDED_UP(x) asm("" : "+v"(x))
// Keeps inner loops out of their callers, whose variables would take registers.
#define EQQUANT_INNERMOST __attribute__((noinline))
// Arrays of vectors stay in registers only if what takes them is part of its caller.
#define EQQUANT_INLINE __attribute__((always_inline))
// The same for everything that a function calls.
#define EQQUANT_FLAT __attribute__((flatten))

namespace eqquant {

// How codes are packed in a byte. The first code is the lowest digit.
enum class Codes : int32_t {
  kInt8 = 0,      // a signed integer
  kNibbles = 1,   // two digits of base 16
  kQuarters = 2,  // four digits of base 4
  kTrits = 3,     // five digits of base 3
  kBits = 4,      // eight digits of base 2
};

// Headers define functions in unnamed namespaces. With external linkage, the linker
// could merge a function with its copy for a newer instruction set.
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

template <int n>
using Number = std::integral_constant<int, n>;

// The least number of bytes that has a multiple of four codes.
constexpr int64_t bytes_of_fours(Codes codes) {
  return codes_per_byte(codes) % 4 == 0 ? 1 : codes_per_byte(codes) == 2 ? 2 : 4;
}

constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t larger(int64_t x, int64_t y) { return x < y ? y : x; }
constexpr int64_t divided_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

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
// of base 3, five in a byte; or as in GGUF's types (a hundred and the number of the
// type), with their scales.
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
  kQ4_1 = 103,
  kQ5_0 = 106,
  kQ5_1 = 107,
  kQ2_K = 110,
  kQ3_K = 111,
  kQ4_K = 112,
  kQ5_K = 113,
  kQ6_K = 114,
  kIQ2_XXS = 116,
  kIQ2_XS = 117,
  kIQ3_XXS = 118,
  kIQ1_S = 119,
  kIQ3_S = 121,
  kIQ2_S = 122,
  kIQ4_XS = 123,
  kIQ1_M = 129,
};

constexpr bool is_gguf(Packing packing) { return static_cast<int32_t>(packing) > 8; }

// The number of points that a packing may index; 0 if it has no codebook.
constexpr int64_t codebook_points(Packing packing) {
  switch (packing) {
    case Packing::kIQ2_XXS:
    case Packing::kIQ3_XXS: return 256;
    case Packing::kIQ2_XS:
    case Packing::kIQ3_S: return 512;
    case Packing::kIQ2_S: return 1024;
    case Packing::kIQ1_S:
    case Packing::kIQ1_M: return 2048;
    default: return 0;
  }
}

// What codes stand for: integers, points of a table of 256, or of 8 bits, floats with 3
// or 2 bits of mantissa (`float8_e4m3fn` and `float8_e5m2`) or integers with a sign.
enum class PointType : int32_t {
  kIntegers = 0,
  kTable = 1,
  kE4M3 = 2,
  kE5M2 = 3,
  kSigned = 4,
};

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

// Runs `task(data, i, worker)` for each `i` below `tasks`, on several threads. Tasks
// that run at the same time have different `worker`s, below `workers` and `tasks`, by
// which they choose their part of the scratch memory.
struct Parallel {
  void (*run)(const void* pool, int64_t tasks,
              void (*task)(void* data, int64_t i, int64_t worker), void* data);
  const void* pool;
  int64_t workers;

  template <class Task>
  void operator()(int64_t tasks, Task task) const {
    run(
        pool, tasks,
        [](void* data, int64_t i, int64_t worker) {
          (*static_cast<Task*>(data))(i, worker);
        },
        &task);
  }
};

// An input that is too large for the digits of its row. Its digits are 0.
struct Outlier {
  int32_t k;
  float x;  // in units of the row
};

// In place of a row's number of outliers: there are too many of them, or the row is too
// small for digits. Its digits are 0 and meaningless.
constexpr int32_t kNoDigits = -1;

// Rows of inputs, as 8-bit integers: `x[m, k] = unit[m] * digit[0, m, k]`, or with a
// second digit, `unit[m] * (digit[0, m, k] + digit[1, m, k] / 254)`.
struct Digits {
  int64_t number;  // 1 or 2
  int64_t rows;
  int64_t stride;  // `codes_of` the bytes of a row of the weight, padded with zeros
  const int8_t* digit;      // [number, rows, stride]
  const float* unit;        // [rows]
  int64_t most;             // how many outliers a row may have
  const int32_t* outliers;  // [rows], how many each has; null if no row has any
  const Outlier* outlier;   // [rows, most], in the order of `k`
};

// The largest word of `Words`: a multiple of 127, so that inputs that were rounded to 8
// bits are not rounded again.
constexpr float kMostWord = 258 * 127;

// Rows of inputs as 16-bit integers, `x[m, k] = unit[m] * word[m, k]`, in the order of
// `words_of_fours.h` if words of the weight are made so.
struct Words {
  int64_t rows;
  int64_t stride;           // `k`, rounded up to a multiple of 64
  const int16_t* word;      // [rows, stride], padded with zeros
  const float* sums;        // [rows, stride / 16], of each 16; null if unused
  const float* unit;        // [rows]
  int64_t most;             // as in `Digits`
  const int32_t* outliers;
  const Outlier* outlier;
};

// The most rows of inputs that are split into parts.
constexpr int64_t kFewPartRows = 16;

// Parts of rows of inputs, in three 8-bit digits: the part `i` adds to its row
// `unit[i] * (digit[i, 0, k] + digit[i, 1, k] / 254 + digit[i, 2, k] / 254**2)`. Parts
// of a row follow each other. Digits are in the order of codes in `fours.h`.
struct RowParts {
  int64_t number;       // how many parts there are
  int64_t stride;       // `k`, rounded up to a multiple of 64, and padded with zeros
  const int8_t* digit;  // [number, 3, stride]
  const float* unit;    // [number]
  // [number, 3, stride / 16 + 1]: the sum of the digits before each 16 of them.
  const int32_t* before;
  const int64_t* row;   // [number]
};

// Rows of inputs in float32, or if `x` is null, as one digit.
struct AnyRows {
  const float* x;  // [rows, stride]
  int64_t stride;
  const int8_t* digit;
  const float* unit;
};

// Matrices of 8-bit integers, and their product `y[m, n]`: of `x[m, k]` with `w[n, k]`,
// or with `w[k, n]`, `across` it. None is empty, and `k` is below 2**17, so that sums
// have 32 bits.
struct ByteMatrices {
  const int8_t* x;
  const int8_t* w;
  float* y;
  int64_t rows, n, k;
  bool across;
};

// The kernels of an instruction set; `products.h` combines them to whole products. No
// two tasks of a kernel add to the same number, so that results do not depend on the
// number of threads.
struct Kernels {
  // y[m, n] = x[m, per * bytes] @ W[n, per * bytes].T, in float32. `scratch` has
  // `forward_scratch` floats.
  int64_t (*forward_scratch)(const Weight&, int64_t rows);
  void (*forward)(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
                  const Parallel&);

  // y[m, k] = x[m, n] @ W[n, k], in float32; `k` may be less than `per * bytes`.
  void (*transposed)(const Weight&, const float* x, float* y, int64_t rows, int64_t k,
                     const Parallel&);

  // Recomputes the non-finite numbers of `y` from a weight that is scaled before the
  // product. All other kernels scale sums, which may overflow or turn infinities of
  // both signs into other values.
  void (*mend)(const Weight&, const AnyRows& x, float* y, int64_t rows,
               const Parallel&);
  void (*mend_transposed)(const Weight&, const float* x, float* y, int64_t rows,
                          int64_t k, const Parallel&);

  // Products of 8-bit integers. Null if the instruction set has none. The last four
  // pointers of `to_digits` are to the memory of `Digits`, which it writes.
  void (*to_digits)(const float* x, int64_t k, const Digits&, int8_t* digit,
                    float* unit, int32_t* outliers, Outlier* outlier, const Parallel&);
  int64_t (*integers_scratch)(const Weight&, const Digits&, int64_t workers);
  void (*integers)(const Weight&, const Digits&, float* y, float* scratch,
                   const Parallel&);

  // Products of 8-bit integers alone. Null if those of weights are faster.
  void (*bytes)(const ByteMatrices&, const Parallel&);

  // Products of bfloat16, accumulated in float32. Null if the instruction set has none.
  int64_t (*bfloat16_scratch)(const Weight&, int64_t rows, int64_t workers);
  void (*bfloat16)(const Weight&, const float* x, float* y, int64_t rows,
                   float* scratch, const Parallel&);

  // The same products of `Blocks`: `y[m, n] = x[m, k] @ W[n, k].T` in float32, and
  // `y[m, k] = x[m, n] @ W[n, k]`. The first in bfloat16 is null if the instruction set
  // has none.
  int64_t (*decoded_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*decoded)(const Blocks&, const float* x, float* y, int64_t rows, float* scratch,
                  const Parallel&);
  void (*decoded_transposed)(const Blocks&, const float* x, float* y, int64_t rows,
                             const Parallel&);
  int64_t (*decoded_bfloat16_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*decoded_bfloat16)(const Blocks&, const float* x, float* y, int64_t rows,
                           float* scratch, const Parallel&);

  // The first of them by products of 16-bit integers, of points that are integers: it
  // gives multiples of `unit`. Null if the instruction set has none. The last five
  // pointers of `to_words` are to the memory of `Words`, which it writes; rows in which
  // `unit` times the unit of the inputs would be too small have no words.
  void (*to_words)(const Blocks&, const float* x, float unit, const Words&,
                   int16_t* word, float* sums, float* unit_of_row, int32_t* outliers,
                   Outlier* outlier, const Parallel&);
  int64_t (*decoded_integers_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*decoded_integers)(const Blocks&, const Words&, float unit, float* y,
                           float* scratch, const Parallel&);

  // The same of at most `kFewPartRows` rows, by products of 8-bit integers, and nearly
  // as exact as in float32: of weights that have fours. Null if the instruction set has
  // none. The last five pointers of `to_parts` are to the memory of `RowParts`, which
  // it writes, and to a number for each row: `kNoDigits` if it has no parts, or 0. It
  // returns how many parts there are, at most two for each row.
  bool (*has_fours)(const Blocks&);
  int64_t (*to_parts)(const Blocks&, const float* x, int64_t rows, float unit,
                      int64_t stride, int8_t* digit, float* unit_of_part,
                      int32_t* before, int64_t* row, int32_t* none, const Parallel&);
  int64_t (*few_integers_scratch)(const Blocks&, int64_t parts, int64_t workers);
  void (*few_integers)(const Blocks&, const RowParts&, float unit, float* y,
                       float* scratch, const Parallel&);
};

extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_bf16_kernels;
extern const Kernels amx_kernels;

// The kernels by which the last two tables differ from `avx512_kernels`.
namespace avx512_bf16 {
int64_t bfloat16_scratch(const Weight&, int64_t rows, int64_t workers);
void bfloat16(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel&);
int64_t decoded_bfloat16_scratch(const Blocks&, int64_t rows, int64_t workers);
void decoded_bfloat16(const Blocks&, const float* x, float* y, int64_t rows,
                      float* scratch, const Parallel&);
}  // namespace avx512_bf16

namespace amx {
int64_t integers_scratch(const Weight&, const Digits&, int64_t workers);
void integers(const Weight&, const Digits&, float* y, float* scratch, const Parallel&);
int64_t bfloat16_scratch(const Weight&, int64_t rows, int64_t workers);
void bfloat16(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel&);
int64_t decoded_bfloat16_scratch(const Blocks&, int64_t rows, int64_t workers);
void decoded_bfloat16(const Blocks&, const float* x, float* y, int64_t rows,
                      float* scratch, const Parallel&);
}  // namespace amx

}  // namespace eqquant
