// What the kernels compute, and the table of them that each instruction set fills.
#pragma once

#include <cstdint>
#include <type_traits>

// Before a loop whose number of turns is known: what an array holds stays in registers.
#define EQQUANT_UNROLL _Pragma("GCC unroll 32")
// After a loop that adds up to `x`: or else GCC keeps it in memory, too, all along.
#define EQQUANT_ADDED_UP(x) asm("" : "+v"(x))
// Not inlined, or else the compiler runs out of registers.
#define EQQUANT_INNERMOST __attribute__((noinline))

namespace eqquant {

// What a byte of codes holds. The first code is in the lowest digit.
enum class Codes : int32_t {
  kInt8 = 0,      // a signed integer
  kNibbles = 1,   // two digits of base 16
  kQuarters = 2,  // four digits of base 4
  kTrits = 3,     // five digits of base 3
  kBits = 4,      // eight digits of base 2
};

// What headers define has no linkage: a function compiled for one instruction set must
// never be called by code for another.
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

// Calls `f` with a constant of that kind.
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

// How many bytes of a row make whole fours of codes.
constexpr int64_t bytes_of_fours(Codes codes) {
  return codes_per_byte(codes) % 4 == 0 ? 1 : codes_per_byte(codes) == 2 ? 2 : 4;
}

constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t larger(int64_t x, int64_t y) { return x < y ? y : x; }
constexpr int64_t divided_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// How many codes some bytes have, up to whole fours of them.
constexpr int64_t codes_of(Codes codes, int64_t bytes) {
  const int64_t step = bytes_of_fours(codes);
  return divided_up(bytes, step) * step * codes_per_byte(codes);
}

}  // namespace

enum class ScaleType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// A weight of `n` rows. Byte `b` of row `i` is at `codes[b * n + i]`: the contracted
// axis comes first. Each `block` bytes of a row share a scale, and a zero-point if
// there are any; there are `blocks` of those, the last of which may be shorter.
struct Weight {
  Codes kind;
  const uint8_t* codes;
  int64_t bytes;
  int64_t n;
  int64_t block;
  int64_t blocks;
  ScaleType scale_type;
  const void* scale;      // at `g * scale_columns + i`
  int64_t scale_columns;  // `n`, or 1: then `i` is 0
  const uint8_t* zero;    // at `g * n + i`; null if there are none; of nibbles only
  const float* points;    // what the digit `d` stands for, of 16; not of `kInt8`
  int32_t offset;         // the code that stands for zero, if there are no zero-points
  int64_t used;           // how many digits of a byte are codes: the first ones
  int64_t k;              // how many codes a row has; what else meets inputs of zero
};

// Runs `task(data, i, worker)` for each `i` below `tasks`, on many threads. No two that
// run at the same time have the same `worker`, which is below `workers` and `tasks`.
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

// An input of a row of digits that is too large for them, which are 0 there.
struct Outlier {
  int32_t k;
  float x;  // in units of the row
};

// Instead of how many outliers a row has: too many, or it is too small for digits. Its
// digits are 0, and say nothing.
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
  const int32_t* outliers;  // [rows], how many it has; null if no row has any
  const Outlier* outlier;   // [rows, most], in the order of `k`
};

// Rows of inputs, as they are, or if `x` is null, as one digit.
struct AnyRows {
  const float* x;  // [rows, stride]
  int64_t stride;
  const int8_t* digit;
  const float* unit;
};

// All of them add to nothing that another task writes, so that results do not depend on
// how many threads there are. `products.h` puts them together.
struct Kernels {
  // y[m, n] = x[m, per * bytes] @ W[n, per * bytes].T, in float32. `scratch` has
  // `forward_scratch` floats.
  int64_t (*forward_scratch)(const Weight&, int64_t rows);
  void (*forward)(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
                  const Parallel&);

  // y[m, k] = x[m, n] @ W[n, k], in float32; `k` may be less than `per * bytes`.
  void (*transposed)(const Weight&, const float* x, float* y, int64_t rows, int64_t k,
                     const Parallel&);

  // Computes once more what is not finite of `y`, each number of the weight scaled on
  // its own. All others scale sums instead, which may be too large, or hide a sum of
  // infinities of both signs.
  void (*mend)(const Weight&, const AnyRows& x, float* y, int64_t rows,
               const Parallel&);
  void (*mend_transposed)(const Weight&, const float* x, float* y, int64_t rows,
                          int64_t k, const Parallel&);

  // Products of integers. Null where the instruction set has none. The last four
  // pointers are to what the digits will consist of.
  void (*to_digits)(const float* x, int64_t k, const Digits&, int8_t* digit,
                    float* unit, int32_t* outliers, Outlier* outlier, const Parallel&);
  int64_t (*integers_scratch)(const Weight&, const Digits&, int64_t workers);
  void (*integers)(const Weight&, const Digits&, float* y, float* scratch,
                   const Parallel&);

  // Inputs and points in bfloat16, sums in float32. Null where the instruction set has
  // no such products.
  int64_t (*bfloat16_scratch)(const Weight&, int64_t rows, int64_t workers);
  void (*bfloat16)(const Weight&, const float* x, float* y, int64_t rows,
                   float* scratch, const Parallel&);
};

extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_bf16_kernels;
extern const Kernels amx_kernels;

// What the last two tables have that the one before does not.
namespace avx512_bf16 {
int64_t bfloat16_scratch(const Weight&, int64_t rows, int64_t workers);
void bfloat16(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel&);
}  // namespace avx512_bf16

namespace amx {
int64_t integers_scratch(const Weight&, const Digits&, int64_t workers);
void integers(const Weight&, const Digits&, float* y, float* scratch, const Parallel&);
int64_t bfloat16_scratch(const Weight&, int64_t rows, int64_t workers);
void bfloat16(const Weight&, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel&);
}  // namespace amx

}  // namespace eqquant
