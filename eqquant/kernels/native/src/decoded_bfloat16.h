// Products of weights of `Blocks` along their blocks, with AVX512_BF16. Inputs and
// decoded numbers are rounded to bfloat16; sums are in float32.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "bfloat16.h"
#include "decoded.h"
#include "kernels.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

class DecodedBfloat16 {
 public:
  // `pairs` are the inputs `x`, rounded, two in each number.
  DecodedBfloat16(const Blocks& w, const float* x, const uint32_t* pairs, float* y,
                  int64_t rows)
      : w_(w), numbers_(w), exact_(w, x, nullptr, y, rows), x_(pairs), rows_(rows) {
    uint16_t at[32];
    for (uint16_t i = 0; i < 32; ++i) at[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    in_pairs_ = _mm512_loadu_si512(at);
  }

  static int64_t pairs(const Blocks& w) { return divided_up(w.k, 2); }

  // The products with the `count` rows of the weight from row `n`: those of some
  // panels. `sums` has a float for each of these and each row of inputs, and as many
  // again for one panel.
  void columns(int64_t n, int64_t count, float* sums) const {
    over_pieces(numbers_, rows_, n, count, sums,
                [&](const Piece<Avx512>& piece, int64_t k, float* mine) {
                  add(piece, k, mine);
                });
    const int64_t each = rows_ * kPanelRows;
    float* const again = sums + divided_up(count, kPanelRows) * each;
    for (int64_t i = 0; i < count; i += kPanelRows) {
      float* const mine = sums + i * rows_;
      if (all_finite<Avx512>(mine, each)) continue;
      // Numbers beyond the range of bfloat16, or infinite ones.
      exact_.many(n + i, smaller(kPanelRows, count - i), again);
      for (int64_t j = 0; j < each; ++j)
        if (!__builtin_isfinite(mine[j])) mine[j] = again[j];
    }
    exact_.store(n, count, sums);
  }

 private:
  void add(const Piece<Avx512>& piece, int64_t k, float* sums) const {
    alignas(64) uint32_t panel[kPieceCodes / 2 * kPanelRows];
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
    const int64_t number = divided_up(piece.number, 2);
    int64_t m = 0;
    const auto rows = [&](auto together) {
      constexpr int R = decltype(together)::value;
      for (; m + R <= rows_; m += R)
        multiply<R>(x_ + m * pairs(w_) + k / 2, panel, number, sums + m * kPanelRows);
    };
    rows(Number<6>());
    rows(Number<4>());
    rows(Number<2>());
    rows(Number<1>());
  }

  // Adds the products of `R` rows of pairs with a panel to `sums`.
  template <int R>
  EQQUANT_INNERMOST void multiply(const uint32_t* x, const uint32_t* panel,
                                  int64_t number, float* sums) const {
    const int64_t stride = pairs(w_);
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
        _mm512_storeu_ps(sums + r * kPanelRows + 16 * v, sum[r][v]);
      }
    }
  }

  const Blocks& w_;
  Numbers<Avx512> numbers_;
  Decoded<Avx512> exact_;
  const uint32_t* x_;
  int64_t rows_;
  __m512i in_pairs_;
};

inline int64_t decoded_bfloat16_panels(const Blocks& w, int64_t rows, int64_t workers) {
  return decoded_panels<Avx512>(w, rows, workers);
}

// The number of floats that each of the workers needs.
inline int64_t decoded_bfloat16_sums(const Blocks& w, int64_t rows, int64_t workers) {
  return (decoded_bfloat16_panels(w, rows, workers) + 1) * rows * kPanelRows;
}

inline int64_t decoded_bfloat16_scratch(const Blocks& w, int64_t rows,
                                        int64_t workers) {
  return workers * decoded_bfloat16_sums(w, rows, workers) +
         rows * DecodedBfloat16::pairs(w);
}

inline void decoded_bfloat16(const Blocks& w, const float* x, float* y, int64_t rows,
                             float* scratch, const Parallel& parallel) {
  const int64_t each = decoded_bfloat16_sums(w, rows, parallel.workers);
  const int64_t number = DecodedBfloat16::pairs(w);
  uint32_t* const pairs =
      reinterpret_cast<uint32_t*>(scratch + parallel.workers * each);
  parallel(rows, [&](int64_t m, int64_t) {
    pairs[(m + 1) * number - 1] = 0;
    round(x + m * w.k, pairs + m * number, w.k);
  });
  const DecodedBfloat16 product(w, x, pairs, y, rows);
  const int64_t together =
      decoded_bfloat16_panels(w, rows, parallel.workers) * kPanelRows;
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together;
    product.columns(n, smaller(together, w.n - n), scratch + worker * each);
  });
}

}  // namespace
}  // namespace eqquant
