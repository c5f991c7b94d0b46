// Products of 4-bit codes by few rows of inputs, a vector of bytes of columns at a
// time, for instruction sets that look points up byte by byte.
#pragma once

#include <cstdint>

#include "isa/planes.h"
#include "products/kernels.h"
#include "products/lookup_tables.h"

namespace eqquant {
namespace {

template <class V>
class ManyColumns<V, Packing::kBits4> {
 public:
  static constexpr int64_t kRows = V::Bytes::lanes, W = V::width;

  explicit ManyColumns(const Blocks& w) : w_(w), halves_(are_halves(w.points)) {}

  template <int R>
  int64_t add(Bytes b, Inputs x, int64_t begin, int64_t end, float* y, bool fresh,
              bool scaled) const {
    const Sum of = {b, x, y, fresh, scaled};
    if (w_.zero_points == nullptr)
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
    using Points = typename V::template Planes<halves>;
    const Points points(w_.points);
    const Bytes b = of.bytes;
    for (; n + kRows <= end; n += kRows) {
      typename V::Floats sum[R][4], zero[4];
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = V::zero();
      }
      if constexpr (zeros) {
        const uint8_t* const at = w_.zero_points + b.block * w_.n + n;
        float floats[kRows];
        for (int i = 0; i < kRows; ++i) floats[i] = at[i];
        Points::deal(floats, zero);
      }
      const uint8_t* c = w_.bytes + b.first * w_.n + n;
      const float* x = of.x.terms;
      for (int64_t i = b.first; i < b.last; ++i, c += w_.n, x += 2) {
        prefetch<2>(c + (b.last - b.first) * w_.n);
        const auto codes = V::Bytes::load(c);
        const auto add = [&](auto digit) {
          typename V::Floats point[4];
          points.template look_up<4 * digit, 4>(codes, point);
          EQQUANT_UNROLL
          for (int v = 0; v < 4; ++v) {
            if constexpr (zeros) point[v] = V::sub(point[v], zero[v]);
            EQQUANT_UNROLL
            for (int r = 0; r < R; ++r)
              sum[r][v] =
                  V::fma(point[v], V::all(x[r * of.x.stride + digit]), sum[r][v]);
          }
        };
        add(Number<0>());
        add(Number<1>());
      }
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        alignas(4 * W) float sums[kRows];
        Points::collect(sum[r], sums);
        for (int64_t v = 0; v < kRows; v += W) {
          float* const y = of.y + r * w_.n + n + v;
          const auto scale =
              of.scaled ? V::scales(w_.scales, b.block, n + v, W) : V::all(1);
          const auto old = of.fresh ? V::zero() : V::load(y);
          V::store(y, V::fma(V::load(sums + v), scale, old));
        }
      }
    }
    return n;
  }

  const Blocks& w_;
  bool halves_;
};

template <class V>
constexpr void add_nibbles(Kernels& found) {
  add_lookup_tables<V>(found);
}

}  // namespace
}  // namespace eqquant
