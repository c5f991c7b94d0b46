// The operands of kernels, and the table of kernels that each instruction set
// fills.
#pragma once

#include <cstdint>

#include "isa/features.h"
#include "weight/trellis.h"
#include "weight/weight.h"

namespace eqquant {

// Runs `task(data, i, worker)` for each `i` below `tasks`, on several threads.
// Concurrent tasks have different `worker`s, below `workers` and `tasks`, which select
// their part of the scratch memory.
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

// The number of outliers of a row without digits: there are too many outliers, or the
// row is too small. Its digits are 0 and meaningless.
constexpr int32_t kNoDigits = -1;

// Rows of inputs, as 8-bit integers: `x[m, k] = unit[m] * digit[0, m, k]`, or with a
// second digit, `unit[m] * (digit[0, m, k] + digit[1, m, k] / 254)`.
struct Digits {
  int64_t number;  // 1 or 2
  int64_t rows;
  int64_t stride;  // `codes_of` the bytes of a row of the weight, padded with zeros
  const int8_t* digit;      // [number, rows, stride]
  const float* unit;        // [rows]
  int64_t most;             // the largest number of outliers of a row
  const int32_t* outliers;  // [rows], the number of outliers; null if there are none
  const Outlier* outlier;   // [rows, most], in the order of `k`
};

// The largest word of `Words`: a multiple of 127, so that inputs that were rounded to 8
// bits are not rounded again.
constexpr float kMostWord = 258 * 127;

// Rows of inputs as 16-bit integers, `x[m, k] = unit[m] * word[m, k]`, in the order of
// `weight/words_of_quads.h` if the words of the weight are in this order.
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

// Parts of rows of inputs, in three 8-bit digits. Part `i` adds `unit[i] * (digit[i, 0,
// k] + digit[i, 1, k] / 254 + digit[i, 2, k] / 254**2)` to its row. The parts of a row
// are consecutive. Digits are in the order of codes in `weight/quads.h`.
struct RowParts {
  int64_t number;       // the number of parts
  int64_t stride;       // `k`, rounded up to a multiple of 64, and padded with zeros
  const int8_t* digit;  // [number, 3, stride]
  const float* unit;    // [number]
  // [number, 3, stride / 16 + 1]: the sum of the digits before each 16 of them.
  const int32_t* before;
  const int64_t* row;   // [number]
};

// Matrices of 8-bit integers, and their product `y[m, n]`: `x[m, k]` with `w[n, k]`, or
// if `across`, with `w[k, n]`. No matrix is empty, and `k` is below 2**17, so that sums
// fit in 32 bits.
struct ByteMatrices {
  const int8_t* x;
  const int8_t* w;
  float* y;
  int64_t rows, n, k;
  bool across;
};

// The kernels of an instruction set, by the headers that define them;
// `whole_products.h` combines them. `scratch` has the number of floats that the
// function before it returns. Kernels that the instruction set lacks are null. No two
// tasks of a kernel add to the same number, so results do not depend on the number of
// threads.
struct Kernels {
  // `y[m, n] = x[m, k] @ W[n, k].T`, from the decoded numbers, for any weight.
  int64_t (*float32_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*float32)(const Blocks&, const float* x, float* y, int64_t rows, float* scratch,
                  const Parallel&);
  // `y[m, k] = x[m, n] @ W[n, k]`, from the decoded numbers.
  void (*float32_across)(const Blocks&, const float* x, float* y, int64_t rows,
                         const Parallel&);
  // The first product in bfloat16, accumulated in float32: for codes of whole bits.
  int64_t (*bfloat16_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*bfloat16)(const Blocks&, const float* x, float* y, int64_t rows,
                   float* scratch, const Parallel&);

  // The first product in 16-bit integers, for points that are integers: it returns
  // multiples of `unit`. The last five pointers of `to_words` are the memory of
  // `Words`, which it writes; rows in which `unit` times the unit of the inputs would
  // be too small have no words.
  void (*to_words)(const Blocks&, const float* x, float unit, const Words&,
                   int16_t* word, float* sums, float* unit_of_row, int32_t* outliers,
                   Outlier* outlier, const Parallel&);
  int64_t (*int16_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*int16)(const Blocks&, const Words&, float unit, float* y, float* scratch,
                const Parallel&);

  // The same for at most `kFewPartRows` rows, in 8-bit integers, and nearly as exact as
  // in float32: for weights that have fours. The last five pointers of `to_parts` are
  // the memory of `RowParts`, which it writes, and a number for each row: `kNoDigits`
  // if it has no parts, or 0. It returns the number of parts, at most two for each row.
  bool (*has_fours)(const Blocks&);
  int64_t (*to_parts)(const Blocks&, const float* x, int64_t rows, float unit,
                      int64_t stride, int8_t* digit, float* unit_of_part,
                      int32_t* before, int64_t* row, int32_t* none, const Parallel&);
  int64_t (*int8_few_rows_scratch)(const Blocks&, int64_t parts, int64_t workers);
  void (*int8_few_rows)(const Blocks&, const RowParts&, float unit, float* y,
                        float* scratch, const Parallel&);

  // The other kernels are for weights `in_bytes`, side by side, with the sizes of whole
  // blocks; `x` has inputs for all codes of their bytes, with zeros beyond `k`. They
  // scale sums, which may overflow or turn infinities of both signs into other values.

  // `y[m, n] = x[m, per * row] @ W[n, per * row].T`, from terms of bytes.
  int64_t (*lookup_tables_scratch)(const Blocks&, int64_t rows);
  void (*lookup_tables)(const Blocks&, const float* x, float* y, int64_t rows,
                        float* scratch, const Parallel&);
  // `y[m, k] = x[m, n] @ W[n, k]`.
  void (*transposed)(const Blocks&, const float* x, float* y, int64_t rows,
                     const Parallel&);
  // The first product in bfloat16, accumulated in float32: for 4-bit codes.
  int64_t (*bfloat16_nibbles_scratch)(const Blocks&, int64_t rows, int64_t workers);
  void (*bfloat16_nibbles)(const Blocks&, const float* x, float* y, int64_t rows,
                           float* scratch, const Parallel&);
  // The first product in 8-bit integers, for whole fours of codes. The last four
  // pointers of `to_digits` are the memory of `Digits`, which it writes.
  void (*to_digits)(const float* x, int64_t k, const Digits&, int8_t* digit,
                    float* unit, int32_t* outliers, Outlier* outlier, const Parallel&);
  int64_t (*int8_scratch)(const Blocks&, const Digits&, int64_t workers);
  void (*int8)(const Blocks&, const Digits&, float* y, float* scratch, const Parallel&);

  // Products of weights in trellis codes: `trellis_row` of a single row, padded with
  // zeros to whole words, by scaled sums. The others are in float32, from the decoded
  // numbers, and in 16-bit integers, as above.
  int64_t (*trellis_row_scratch)(const TrellisWeight&, int64_t workers);
  void (*trellis_row)(const TrellisWeight&, const float* x, float* y, float* scratch,
                      const Parallel&);
  int64_t (*trellis_scratch)(const TrellisWeight&, int64_t rows, int64_t workers);
  void (*trellis)(const TrellisWeight&, const float* x, float* y, int64_t rows,
                  float* scratch, const Parallel&);
  void (*trellis_across)(const TrellisWeight&, const float* x, float* y, int64_t rows,
                         const Parallel&);
  void (*trellis_to_words)(const TrellisWeight&, const float* x, const Words&,
                           int16_t* word, float* unit_of_row, int32_t* outliers,
                           Outlier* outlier, const Parallel&);
  int64_t (*trellis_int16_scratch)(const TrellisWeight&, int64_t rows,
                                   int64_t workers);
  void (*trellis_int16)(const TrellisWeight&, const Words&, float* y, float* scratch,
                        const Parallel&);

  // Products of 8-bit integers without scales.
  void (*int8_matrices)(const ByteMatrices&, const Parallel&);
};

// The products of a weight by the names of their kernels.
#define EQQUANT_PRODUCTS(f)                                                           \
  f(float32) f(float32_across) f(bfloat16) f(int16) f(int8_few_rows) f(lookup_tables) \
      f(transposed) f(bfloat16_nibbles) f(int8)
enum class Product : int32_t {
#define EQQUANT_PRODUCT(name) name,
  EQQUANT_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
};

// The same of weights in trellis codes.
#define EQQUANT_TRELLIS_PRODUCTS(f) f(trellis) f(trellis_across) f(trellis_int16)
enum class TrellisProduct : int32_t {
#define EQQUANT_PRODUCT(name) name,
  EQQUANT_TRELLIS_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
};

// An instruction set: features of processors, by name (the last is its own) and as bits
// of `Feature`, and the kernels for processors with all of them.
struct Set {
  const char* names;
  uint32_t features;
  Kernels kernels;
};

// The sets, in the order of `build.py`: each after the one that it extends.
struct Sets {
  const Set* first;
  int32_t number;

  EQQUANT_INLINE const Set* begin() const { return first; }
  EQQUANT_INLINE const Set* end() const { return first + number; }
};
Sets sets();

// Returns the kernels of the set to which a feature belongs.
const Kernels& table_of(Feature own);

}  // namespace eqquant
