// Products of matrices of 8-bit integers with AVX2. They are exact, up to rounding to
// float32.
//
// `vpmaddubsw` multiplies unsigned bytes by signed ones, and adds pairs of products in
// 16 bits. These hold the absolute values of `w` times any `x`. So `w` is packed as
// absolute values, and as signs by which `x` is negated. Inverting bits is faster,
// which gives `-x - 1`: then the absolute values of all negative numbers of `w` are
// missing from a sum, and they are added once.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/avx2.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

class ByteProduct {
 public:
  // The number of columns of `y` that are computed together.
  static constexpr int64_t kColumns = 16;

  explicit ByteProduct(const ByteMatrices& a) : a_(a) {}

  // Computes the results of some rows in the columns of a panel from `n` on.
  void columns(int64_t n, int64_t first_row, int64_t last_row) const {
    Panel panel;
    panel.n = n;
    panel.count = smaller(kColumns, a_.n - n);
    for (panel.k = 0; panel.k < a_.k; panel.k += kCodes) {
      panel.codes = smaller(kCodes, a_.k - panel.k);
      a_.across ? pack<true>(panel) : pack<false>(panel);
      int64_t m = first_row;
      for (; m + 3 <= last_row; m += 3) multiply<3>(panel, m);
      for (; m < last_row; ++m) multiply<1>(panel, m);
    }
  }

 private:
  // The number of numbers of a column that are packed at a time: they stay in the first
  // cache.
  static constexpr int64_t kCodes = 1024;
  // The absolute values, then the signs, of four numbers of eight columns.
  static constexpr int64_t kFours = 64;

  // Some rows of `w`, or of its transpose, from position `k` on.
  struct Panel {
    int64_t n, count, k, codes;
    __m256i missing[2];
    alignas(64) int8_t fours[kCodes / 4 * 2 * kFours];
  };

  static __m256i load(const int8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(int8_t* p, __m256i x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), x);
  }
  static int32_t four(const int8_t* p) {
    int32_t found;
    std::memcpy(&found, p, 4);
    return found;
  }
  static __m256i sums_of_fours(__m256i positive, __m256i x) {
    return _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(positive, x));
  }

  template <bool across>
  EQQUANT_INNERMOST void pack(Panel& panel) const {
    panel.missing[0] = panel.missing[1] = _mm256_setzero_si256();
    int8_t* to = panel.fours;
    for (int64_t k = 0; k < panel.codes; k += 4)
      for (int64_t v = 0; v < 2; ++v, to += kFours) {
        const bool whole = panel.codes - k >= 4 && panel.count - 8 * v >= 8;
        const __m256i w = whole ? fours<across>(panel.n + 8 * v, panel.k + k)
                                : part<across>(panel, v, k);
        const __m256i size = _mm256_abs_epi8(w);
        const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), w);
        store(to, size);
        store(to + kFours / 2, negative);
        panel.missing[v] =
            _mm256_sub_epi32(panel.missing[v], sums_of_fours(size, negative));
      }
  }

  const int8_t* at(bool across, int64_t n, int64_t k) const {
    return a_.w + (across ? k * a_.n + n : n * a_.k + k);
  }

  // Returns four numbers of eight columns.
  template <bool across>
  __m256i fours(int64_t n, int64_t k) const {
    const int8_t* const p = at(across, n, k);
    if constexpr (!across) {
      const int64_t s = a_.k;
      return _mm256_setr_epi32(four(p), four(p + s), four(p + 2 * s), four(p + 3 * s),
                               four(p + 4 * s), four(p + 5 * s), four(p + 6 * s),
                               four(p + 7 * s));
    }
    __m128i row[4];
    for (int64_t i = 0; i < 4; ++i)
      row[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * a_.n));
    const __m128i first = _mm_unpacklo_epi8(row[0], row[1]);
    const __m128i last = _mm_unpacklo_epi8(row[2], row[3]);
    return _mm256_set_m128i(_mm_unpackhi_epi16(first, last),
                            _mm_unpacklo_epi16(first, last));
  }

  // The same at the ends of `w`, with zeros beyond them.
  template <bool across>
  __m256i part(const Panel& panel, int64_t v, int64_t k) const {
    alignas(32) int8_t found[32] = {};
    for (int64_t i = 0; i < smaller(8, panel.count - 8 * v); ++i)
      for (int64_t j = 0; j < smaller(4, panel.codes - k); ++j)
        found[4 * i + j] = *at(across, panel.n + 8 * v + i, panel.k + k + j);
    return load(found);
  }

  // Adds the products of `R` rows of `x` with a panel to `y`, which holds integers
  // until the last panel.
  template <int R>
  EQQUANT_INNERMOST void multiply(const Panel& panel, int64_t m) const {
    const int8_t* x = a_.x + m * a_.k + panel.k;
    const int8_t* w = panel.fours;
    __m256i sum[R][2];
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    const auto add = [&](auto four_of_row) {
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i all = _mm256_set1_epi32(four_of_row(x + r * a_.k));
        EQQUANT_UNROLL
        for (int v = 0; v < 2; ++v) {
          const __m256i negated =
              _mm256_xor_si256(all, load(w + v * kFours + kFours / 2));
          sum[r][v] =
              _mm256_add_epi32(sum[r][v], sums_of_fours(load(w + v * kFours), negated));
        }
      }
    };
    // (Otherwise decoding the instructions of the loop would take as long as the
    // products.)
#pragma GCC unroll 4
    for (int64_t q = panel.codes / 4; q > 0; --q, x += 4, w += 2 * kFours) add(four);
    if (panel.codes % 4 != 0)
      add([&](const int8_t* p) {
        int32_t found = 0;
        std::memcpy(&found, p, static_cast<size_t>(panel.codes % 4));
        return found;
      });
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 2; ++v) {
        EQQUANT_ADDED_UP(sum[r][v]);
        finish(panel, _mm256_add_epi32(sum[r][v], panel.missing[v]),
               a_.y + (m + r) * a_.n + panel.n + 8 * v, panel.count - 8 * v);
      }
    }
  }

  void finish(const Panel& panel, __m256i sum, float* y, int64_t count) const {
    if (count <= 0) return;
    const bool whole = count >= 8;
    if (panel.k > 0)
      sum = _mm256_add_epi32(sum, _mm256_castps_si256(whole ? Avx2::load(y)
                                                            : Avx2::load(y, count)));
    const bool last = panel.k + panel.codes == a_.k;
    const __m256 found = last ? _mm256_cvtepi32_ps(sum) : _mm256_castsi256_ps(sum);
    whole ? Avx2::store(y, found) : Avx2::store(y, found, count);
  }

  const ByteMatrices& a_;
};

void multiply_bytes(const ByteMatrices& a, const Parallel& parallel) {
  const ByteProduct product(a);
  const int64_t panels = divided_up(a.n, ByteProduct::kColumns);
  // A few tasks for each thread.
  constexpr int64_t most = 2048, least = 96;
  const int64_t parts = larger(divided_up(a.rows, most),
                               smaller(divided_up(4 * parallel.workers, panels),
                                       divided_up(a.rows, least)));
  parallel(parts * panels, [&](int64_t i, int64_t) {
    const int64_t part = i / panels;
    product.columns(i % panels * ByteProduct::kColumns, part * a.rows / parts,
                    (part + 1) * a.rows / parts);
  });
}

template <class V>
constexpr void add_int8_matrices(Kernels& found) {
  found.int8_matrices = multiply_bytes;
}

}  // namespace
}  // namespace eqquant
