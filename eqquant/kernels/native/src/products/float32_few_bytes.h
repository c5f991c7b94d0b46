// Products of weights by a few rows of inputs, for codes that are bytes.
//
// Codes of adjacent rows are adjacent in memory, codes of a row are far apart. Memory
// is read fastest in long runs, so this takes a few codes of many panels at a time, not
// many codes of a panel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "products/float32_few_rows.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "weight/panel_reader.h"

namespace eqquant {
namespace {

template <class V, class P, int R>
class FewBytes {
 public:
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;
  // The number of codes of a panel that are taken at a time, the number of codes by
  // which memory is prefetched, and the number of codes that are summed before they are
  // scaled.
  static constexpr int64_t kTogether = 4, kCodesAhead = 8, kSummed = 64;

  FewBytes(const Blocks& w, const Numbers<V>& numbers, const FewInputs& x)
      : w_(w), numbers_(numbers), x_(x), points_(w),
        plain_(w.offset == Offset::kNone && !P::kWide) {}

  // Computes the products with whole panels from row `n`.
  void columns(int64_t n, int64_t panels, float* sums, float* scratch) {
    n_ = n;
    sums_ = sums;
    some_ = scratch;
    block_ = scratch + panels * R * kRows;
    LongSums<V> all(sums, panels * R * kRows, w_.k, summed_codes(w_));
    for (int64_t k = 0; k < w_.k; k = last_) {
      first_ = k;
      last_ = smaller(k + kSummed, smaller((k / w_.block + 1) * w_.block, w_.k));
      if (!plain_)
        for (int64_t p = 0; p < panels; ++p) read(p);
      if (w_.offset == Offset::kMinimum)
        for (int r = 0; r < R; ++r) inputs_[r] = V::all(x_.sum(r, first_, last_));
      int64_t here = k;
      for (; here + kTogether <= last_; here += kTogether)
        some<kTogether>(here, panels);
      for (; here < last_; ++here) some<1>(here, panels);
      all.reach(last_);
    }
    all.finish();
  }

 private:
  // Adds the products of `number` codes of each panel from code `k` on.
  template <int64_t number>
  void some(int64_t k, int64_t panels) {
    const bool first = k == first_, last = k + number == last_;
    const auto each = [&](auto is_first, auto is_last) {
      for (int64_t p = 0; p < panels; ++p)
        this->add<number, is_first.value, is_last.value>(k, p);
    };
    using std::false_type, std::true_type;
    if (first) last ? each(true_type(), true_type()) : each(true_type(), false_type());
    else last ? each(false_type(), true_type()) : each(false_type(), false_type());
  }

  // Adds the products of `number` codes of a panel from code `k` on: to the products of
  // the earlier codes of the same block, unless they are the first. The last are
  // scaled.
  template <int64_t number, bool first, bool last>
  EQQUANT_INNERMOST void add(int64_t k, int64_t p) {
    float* const mine = some_ + p * R * kRows;
    typename V::Floats sum[R][4], less[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      less[v] = P::kWide ? V::load(block(p) + v * W) : V::zero();
    each([&](int r, int v) {
      sum[r][v] = first ? V::zero() : V::load(mine + r * kRows + v * W);
    });
    const uint8_t* c = w_.bytes + k * w_.n + n_ + p * kRows;
    EQQUANT_UNROLL
    for (int64_t i = 0; i < number; ++i, c += w_.n) {
      prefetch<2>(c + kCodesAhead * w_.n);
      typename V::Floats point[4];
      points_(c, less, point);
      each([&](int r, int v) {
        sum[r][v] = V::fma(point[v], V::all(x_.x[r * w_.k + k + i]), sum[r][v]);
      });
    }
    if constexpr (last) scale(sum, p);
    else
      each([&](int r, int v) { V::store(mine + r * kRows + v * W, sum[r][v]); });
  }

  // Adds the scaled products with the current block to the sums of a panel.
  void scale(const typename V::Floats (*sum)[4], int64_t p) {
    float* const to = sums_ + p * R * kRows;
    const float* const scales = block(p) + kRows;
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t n = n_ + p * kRows + v * W;
      auto scale = plain_ ? V::scales(w_.scales, first_ / w_.block, n, W)
                          : V::load(scales + v * W);
      if constexpr (P::kUnit != 1) scale = V::mul(scale, V::all(P::kUnit));
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        float* const mine = to + r * kRows + v * W;
        auto total = V::fma(sum[r][v], scale, V::load(mine));
        if (w_.offset == Offset::kMinimum)
          total = V::fma(V::load(scales + kRows + v * W), inputs_[r], total);
        V::store(mine, total);
      }
    }
  }

  // The parameters of the current block for the rows of a panel, unless there is only a
  // scale: `less`, `scale` and `rest` of a `Piece`.
  float* block(int64_t p) const { return block_ + p * 3 * kRows; }

  void read(int64_t p) {
    Places places = {};
    const int64_t i = first_ / numbers_.codes();
    numbers_.read_runs(i, n_ + p * kRows, kRows, piece_, places);
    int64_t run = 0;
    while (piece_.run[run].last <= first_ - i * numbers_.codes()) ++run;
    const float* const parts[3] = {piece_.less, piece_.scale, piece_.rest};
    EQQUANT_UNROLL
    for (int j = 0; j < 3; ++j) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v)
        V::store(block(p) + j * kRows + v * W, V::load(parts[j] + run * kRows + v * W));
    }
  }

  template <class F>
  static void each(F f) {
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) f(r, v);
    }
  }

  const Blocks& w_;
  const Numbers<V>& numbers_;
  const FewInputs& x_;
  P points_;
  bool plain_;
  Piece<V> piece_;
  int64_t n_, first_, last_;
  float *sums_, *some_, *block_;
  typename V::Floats inputs_[R];
};

}  // namespace
}  // namespace eqquant
