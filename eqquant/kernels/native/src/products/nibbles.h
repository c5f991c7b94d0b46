// Products of codes of 4 bits by few rows of inputs, 32 columns at a time (AVX2).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx2.h"
#include "isa/byte_planes.h"
#include "products/kernels.h"
#include "products/lookup_tables.h"

namespace eqquant {
namespace {

template <>
class ManyColumns<Avx2, Codes::kNibbles> {
 public:
  explicit ManyColumns(const Weight& w) : w_(w), halves_(are_halves(w.points)) {}

  template <int R>
  int64_t add(Bytes b, Inputs x, int64_t begin, int64_t end, float* y, bool fresh,
              bool scaled) const {
    const Sum of = {b, x, y, fresh, scaled};
    if (w_.zero == nullptr)
      return halves_ ? some<R, true, false>(of, begin, end)
                     : some<R, false, false>(of, begin, end);
    return halves_ ? some<R, true, true>(of, begin, end)
                   : some<R, false, true>(of, begin, end);
  }

 private:
  struct Sum {
    Bytes bytes;
    Inputs x;
    float* y;
    bool fresh, scaled;
  };

  template <int R, bool halves, bool zeros>
  int64_t some(Sum of, int64_t n, int64_t end) const {
    using Points = BytePlanes<halves>;
    const Points points(w_.points);
    const Bytes b = of.bytes;
    for (; n + 32 <= end; n += 32) {
      __m256 sum[R][4], zero[4];
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = _mm256_setzero_ps();
      }
      if constexpr (zeros) {
        const uint8_t* const at = w_.zero + b.block * w_.n + n;
        float floats[32];
        for (int i = 0; i < 32; ++i) floats[i] = at[i];
        Points::deal(floats, zero);
      }
      const uint8_t* c = w_.codes + b.first * w_.n + n;
      const float* x = of.x.terms;
      for (int64_t i = b.first; i < b.last; ++i, c += w_.n, x += 2) {
        _mm_prefetch(reinterpret_cast<const char*>(c + (b.last - b.first) * w_.n),
                     _MM_HINT_T1);
        const __m256i codes = Bytes256::load(c);
        const auto add = [&](auto digit) {
          __m256 point[4];
          points.template look_up<4 * digit, 4>(codes, point);
          EQQUANT_UNROLL
          for (int v = 0; v < 4; ++v) {
            if constexpr (zeros) point[v] = _mm256_sub_ps(point[v], zero[v]);
            EQQUANT_UNROLL
            for (int r = 0; r < R; ++r)
              sum[r][v] = _mm256_fmadd_ps(
                  point[v], _mm256_broadcast_ss(x + r * of.x.stride + digit),
                  sum[r][v]);
          }
        };
        add(Number<0>());
        add(Number<1>());
      }
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        alignas(32) float sums[32];
        Points::collect(sum[r], sums);
        for (int v = 0; v < 32; v += 8) {
          float* const y = of.y + r * w_.n + n + v;
          const auto scale =
              of.scaled ? Avx2::scales(w_, b.block, n + v, 8) : Avx2::all(1);
          const auto old = of.fresh ? Avx2::zero() : Avx2::load(y);
          Avx2::store(y, Avx2::fma(Avx2::load(sums + v), scale, old));
        }
      }
    }
    return n;
  }

  const Weight& w_;
  bool halves_;
};

template <class V>
constexpr void add_nibbles(Kernels& found) {
  add_lookup_tables<V>(found);
}

}  // namespace
}  // namespace eqquant
