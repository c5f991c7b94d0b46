// Products of weights along their blocks, with AVX512_BF16. Inputs and decoded numbers
// are rounded to bfloat16; sums are in float32.
//
// A panel is decoded to pairs of numbers, one in each lane: the pairs of 64 rows, then
// the next pair of each row. A class `Rows` holds the rounded inputs, and multiplies
// some codes of a panel by all rows of inputs.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx512.h"
#include "products/bfloat16_nibbles.h"
#include "products/float32.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// Multiplies panels by rows of pairs. The sums of a few rows stay in registers.
class PairsInRegisters {
 public:
  // The number of codes that are decoded before they are multiplied: the decoded
  // numbers fit in the first cache.
  static constexpr int64_t kCodes = 128;
  // Panels are padded with zeros to a multiple of this many pairs.
  static constexpr int64_t kWhole = 1;
  // A resource that a thread holds while it multiplies: none.
  struct Scope {};

  // The number of rows that have sums.
  static int64_t whole(int64_t rows) { return rows; }

  // The number of floats that the rounded inputs need.
  static int64_t scratch(const Blocks& w, int64_t rows) { return rows * pairs(w); }

  PairsInRegisters(const Blocks& w, const float* x, int64_t rows, float* scratch,
                   const Parallel& parallel)
      : x_(reinterpret_cast<uint32_t*>(scratch)), stride_(pairs(w)), rows_(rows) {
    uint32_t* const found = reinterpret_cast<uint32_t*>(scratch);
    parallel(rows, [&](int64_t m, int64_t) {
      found[(m + 1) * stride_ - 1] = 0;
      round(x + m * w.k, found + m * stride_, w.k);
    });
  }

  // Adds the products with the `number` pairs of a panel from pair `first` to `sums`.
  void add(const uint32_t* panel, int64_t first, int64_t number, float* sums) const {
    int64_t m = 0;
    const auto rows = [&](auto together) {
      constexpr int R = decltype(together)::value;
      for (; m + R <= rows_; m += R)
        multiply<R>(x_ + m * stride_ + first, panel, number, sums + m * kPanelRows);
    };
    rows(Number<6>());
    rows(Number<4>());
    rows(Number<2>());
    rows(Number<1>());
  }

 private:
  static int64_t pairs(const Blocks& w) { return divided_up(w.k, 2); }

  // Adds the products of `R` rows of pairs with a panel to `sums`.
  template <int R>
  EQQUANT_INNERMOST void multiply(const uint32_t* x, const uint32_t* panel,
                                  int64_t number, float* sums) const {
    __m512 sum[R][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v)
        sum[r][v] = _mm512_loadu_ps(sums + r * kPanelRows + 16 * v);
    }
    for (int64_t i = 0; i < number; ++i, ++x, panel += kPanelRows) {
      __m512bh w[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) w[v] = as_bfloat16(_mm512_load_si512(panel + 16 * v));
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512bh pair =
            as_bfloat16(_mm512_set1_epi32(static_cast<int>(x[r * stride_])));
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], w[v], pair);
      }
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        EQQUANT_ADDED_UP(sum[r][v]);
        _mm512_storeu_ps(sums + r * kPanelRows + 16 * v, sum[r][v]);
      }
    }
  }

  const uint32_t* x_;
  int64_t stride_;
  int64_t rows_;
};

template <class Rows>
class DecodedBfloat16 {
 public:
  // `inputs` are the rounded inputs `x`.
  DecodedBfloat16(const Blocks& w, const float* x, const Rows& inputs, float* y,
                  int64_t rows)
      : w_(w),
        numbers_(w),
        exact_(w, x, nullptr, y, rows),
        inputs_(inputs),
        rows_(rows) {
    uint16_t at[32];
    for (uint16_t i = 0; i < 32; ++i) at[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    in_pairs_ = _mm512_loadu_si512(at);
  }

  // Computes the products with the `count` rows of the weight from row `n`, which are
  // some panels. `sums` are `LongSums` of each of these and each of the `Rows::whole`
  // rows of inputs, followed by sums of one panel.
  void columns(int64_t n, int64_t count, float* sums) const {
    [[maybe_unused]] const typename Rows::Scope scope;
    const int64_t each = Rows::whole(rows_) * kPanelRows;
    // Whole pieces, since the numbers of codes are powers of two.
    const int64_t together = Rows::kCodes / numbers_.codes();
    alignas(64) uint32_t panel[Rows::kCodes / 2 * kPanelRows];
    over_pieces(w_, numbers_, together, kBfloat16Summed, each, n, count, sums,
                [&](const Piece<Avx512>& piece, int64_t k, float* mine) {
                  const int64_t first = k / Rows::kCodes * Rows::kCodes;
                  const int64_t last = k + piece.number;
                  decode(piece, panel + (k - first) / 2 * kPanelRows);
                  if (last == w_.k || last == first + Rows::kCodes)
                    inputs_.add(panel, first / 2, divided_up(last - first, 2), mine);
                });
    const int64_t all = divided_up(count, kPanelRows) * each;
    float* const again = sums + LongSums<Avx512>::floats(all, w_.k);
    for (int64_t i = 0; i < count; i += kPanelRows) {
      float* const mine = sums + i / kPanelRows * each;
      const int64_t number = rows_ * kPanelRows;
      if (all_finite<Avx512>(mine, number)) continue;
      // Some numbers are beyond the range of bfloat16, or infinite.
      exact_.many(n + i, smaller(kPanelRows, count - i), again);
      for (int64_t j = 0; j < number; ++j)
        if (!__builtin_isfinite(mine[j])) mine[j] = again[j];
    }
    exact_.store(n, count, sums, each);
  }

 private:
  void decode(const Piece<Avx512>& piece, uint32_t* panel) const {
    numbers_.decode(piece, 0, piece.number,
                    [&](int64_t i, const __m512* a, const __m512* b) {
                      uint32_t* const to = panel + i / 2 * kPanelRows;
                      EQQUANT_UNROLL
                      for (int v = 0; v < 4; ++v) {
                        const __m512bh both = _mm512_cvtne2ps_pbh(b[v], a[v]);
                        __m512i bits;
                        __builtin_memcpy(&bits, &both, 64);
                        _mm512_store_si512(to + 16 * v,
                                           _mm512_permutexvar_epi16(in_pairs_, bits));
                      }
                    });
    for (int64_t i = divided_up(piece.number, 2); i % Rows::kWhole != 0; ++i)
      for (int64_t v = 0; v < 4; ++v)
        _mm512_store_si512(panel + i * kPanelRows + 16 * v, _mm512_setzero_si512());
  }

  const Blocks& w_;
  Numbers<Avx512> numbers_;
  Decoded<Avx512> exact_;
  const Rows& inputs_;
  int64_t rows_;
  __m512i in_pairs_;
};

// The number of floats that each of the workers needs for sums of `whole` rows.
inline int64_t bfloat16_sums(const Blocks& w, int64_t whole, int64_t workers) {
  const int64_t panels = decoded_panels<Avx512>(w, whole, workers) + 1;
  return LongSums<Avx512>::floats(panels * whole * kPanelRows, w.k);
}

template <class Rows>
int64_t bfloat16_scratch(const Blocks& w, int64_t rows, int64_t workers) {
  return workers * bfloat16_sums(w, Rows::whole(rows), workers) +
         Rows::scratch(w, rows);
}

template <class Rows>
void bfloat16(const Blocks& w, const float* x, float* y, int64_t rows, float* scratch,
              const Parallel& parallel) {
  const int64_t whole = Rows::whole(rows);
  const int64_t each = bfloat16_sums(w, whole, parallel.workers);
  const Rows inputs(w, x, rows, scratch + parallel.workers * each, parallel);
  const DecodedBfloat16<Rows> product(w, x, inputs, y, rows);
  const int64_t together =
      decoded_panels<Avx512>(w, whole, parallel.workers) * kPanelRows;
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together;
    in_turns(w, n, smaller(together, w.n - n), [&](int64_t first, int64_t number) {
      product.columns(first, number, scratch + worker * each);
    });
  });
}

template <class V>
constexpr void add_bfloat16(Kernels& found) {
  found.bfloat16_scratch = bfloat16_scratch<PairsInRegisters>;
  found.bfloat16 = bfloat16<PairsInRegisters>;
}

}  // namespace
}  // namespace eqquant
