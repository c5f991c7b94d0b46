// Products along the blocks of a weight of nibbles, with AVX512_BF16. Inputs and points
// are rounded to bfloat16; sums are in float32, and are scaled for each block. A byte
// is a pair of codes, which becomes one lane of two bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx512.h"
#include "products/columns.h"
#include "products/kernels.h"
#include "products/long_sums.h"

namespace eqquant {
namespace {

// The number of bytes of each row of a panel that are decoded at a time.
constexpr int64_t kBfloat16Bytes = 64;

// The largest number of adjacent panels of a task.
constexpr int kBfloat16Panels = 16;

// The number of codes after which sums are added up in float64: up to then, their
// errors are small beside the errors of bfloat16.
constexpr int64_t kBfloat16Summed = 4096;

inline uint32_t rounded(float x) {
  const __m256bh found = _mm512_cvtneps_pbh(_mm512_set1_ps(x));
  uint16_t bits;
  __builtin_memcpy(&bits, &found, 2);
  return bits;
}

inline void round(const float* x, uint32_t* found, int64_t number) {
  uint16_t* to = reinterpret_cast<uint16_t*>(found);
  for (int64_t i = 0; i < number; i += 16) {
    const __mmask16 mask = Avx512::first(smaller(16, number - i));
    const __m256bh some = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
    __m256i bits;
    __builtin_memcpy(&bits, &some, 32);
    _mm256_mask_storeu_epi16(to + i, mask, bits);
  }
}

inline __m512bh as_bfloat16(__m512i x) {
  __m512bh found;
  __builtin_memcpy(&found, &x, 64);
  return found;
}

// Products with up to `kTogether` adjacent panels.
template <int64_t kTogether>
class Bfloat16 {
 public:
  // `x` has a pair of numbers for each byte.
  Bfloat16(const Blocks& w, const uint32_t* x, float* y, int64_t rows)
      : w_(w), x_(x), y_(y), rows_(rows) {
    uint32_t point[16];
    for (int i = 0; i < 16; ++i) point[i] = rounded(w.points[i]);
    const __m512i low = _mm512_loadu_si512(point);
    // One permutation of 16-bit elements looks up both codes of each lane. It uses five
    // bits of an index, so the table has the 16 points twice.
    table_ = _mm512_permutex2var_epi16(low, pairs(), low);
  }

  // Computes the products with the `count` rows of `W` from row `n`, which are the
  // panels.
  void columns(int64_t n, int64_t count, float* sums) const {
    const int64_t panels = divided_up(count, kPanelRows), each = rows_ * kPanelRows;
    LongSums<Avx512> all(sums, panels * each, 2 * w_.in_bytes.row, kBfloat16Summed);
    for (int64_t g = 0; g < w_.in_bytes.blocks; ++g) {
      const int64_t end = smaller((g + 1) * w_.in_bytes.block, w_.in_bytes.row);
      for (int64_t b = g * w_.in_bytes.block; b < end; b += kBfloat16Bytes) {
        const int64_t last = smaller(b + kBfloat16Bytes, end);
        const int64_t next = smaller(last - b, w_.in_bytes.row - last);
        const Soon<kTogether> soon = {w_.bytes + last * w_.n + n, w_.n, next};
        for (int64_t p = 0; p < panels; ++p)
          some(n + p * kPanelRows, smaller(kPanelRows, count - p * kPanelRows), g, b,
               last, sums + p * each, soon.part(p, panels));
        all.reach(2 * last);
      }
    }
    all.finish();
    store_columns<Avx512>(w_, sums, each, rows_, n, count, y_);
  }

 private:
  static __m512i pairs() {
    uint16_t at[32];
    for (uint16_t i = 0; i < 32; ++i) at[i] = static_cast<uint16_t>(2 * (i % 16));
    return _mm512_loadu_si512(at);
  }

  // Decodes and multiplies the bytes from `first` to `last` of a panel, in block `g`.
  void some(int64_t n, int64_t count, int64_t g, int64_t first, int64_t last,
            float* sums, const Soon<kTogether>& soon) const {
    alignas(64) uint32_t panel[kBfloat16Bytes * kPanelRows];
    __m512 scale[4];
    scales_of_panel<Avx512>(w_, g, n, count, scale);
    decode(n, count, first, last, panel);
    int64_t m = 0;
    auto rows = [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (; m + R <= rows_; m += R)
        multiply<R>(x_ + m * w_.in_bytes.row + first, panel, last - first, scale,
                    sums + m * kPanelRows, soon.part(m / R, divided_up(rows_, R)));
    };
    rows(Number<6>());
    rows(Number<4>());
    rows(Number<2>());
    rows(Number<1>());
  }

  void decode(int64_t n, int64_t count, int64_t first, int64_t last,
              uint32_t* panel) const {
    for (int64_t b = first; b < last; ++b) {
      const uint8_t* c = w_.bytes + b * w_.n + n;
      for (int64_t v = 0; v < 4; ++v, panel += 16) {
        const int64_t here = smaller(16, count - 16 * v);
        if (here <= 0) {
          _mm512_store_si512(panel, _mm512_setzero_si512());
          continue;
        }
        const __m512i codes = Avx512::bytes<false>(c + 16 * v, here);
        // The low code stays in the low half; the high code moves to the high half.
        const __m512i both = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 12));
        _mm512_store_si512(panel, _mm512_permutexvar_epi16(both, table_));
      }
    }
  }

  // Adds the products of `R` rows of pairs with the 64 rows of a panel to `sums`.
  template <int R>
  EQQUANT_INNERMOST void multiply(const uint32_t* x, const uint32_t* panel,
                                  int64_t bytes, const __m512* scale, float* sums,
                                  Soon<kTogether> soon) const {
    const int64_t stride = w_.in_bytes.row;
    const int64_t each = divided_up(soon.bytes, bytes);
    __m512 sum[R][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < bytes; ++b, ++x, panel += kPanelRows) {
      soon.ask(each);
      __m512bh w[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) w[v] = as_bfloat16(_mm512_load_si512(panel + 16 * v));
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512bh pair =
            as_bfloat16(_mm512_set1_epi32(static_cast<int>(x[r * stride])));
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], w[v], pair);
      }
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        EQQUANT_ADDED_UP(sum[r][v]);
        float* y = sums + r * kPanelRows + 16 * v;
        _mm512_storeu_ps(y, _mm512_fmadd_ps(sum[r][v], scale[v], _mm512_loadu_ps(y)));
      }
    }
  }

  const Blocks& w_;
  const uint32_t* x_;
  float* y_;
  int64_t rows_;
  __m512i table_;
};

inline int64_t bfloat16_nibbles_scratch(const Blocks& w, int64_t rows,
                                        int64_t workers) {
  return rows * w.in_bytes.row +
         sums_of_columns<Avx512, kBfloat16Panels>(w, rows, workers);
}

inline void bfloat16_nibbles(const Blocks& w, const float* x, float* y, int64_t rows,
                             float* scratch, const Parallel& parallel) {
  float* const sums = scratch;
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(
      sums + sums_of_columns<Avx512, kBfloat16Panels>(w, rows, parallel.workers));
  parallel(rows, [&](int64_t m, int64_t) {
    round(x + 2 * m * w.in_bytes.row, pairs + m * w.in_bytes.row, 2 * w.in_bytes.row);
  });
  over_columns<Avx512, kBfloat16Panels>(
      w, rows, sums, parallel, [&](auto panels, int64_t n, int64_t count, float* mine) {
        const Bfloat16<decltype(panels)::value> product(w, pairs, y, rows);
        product.columns(n, count, mine);
      });
}

template <class V>
constexpr void add_bfloat16_nibbles(Kernels& found) {
  found.bfloat16_nibbles_scratch = bfloat16_nibbles_scratch;
  found.bfloat16_nibbles = bfloat16_nibbles;
}

}  // namespace
}  // namespace eqquant
