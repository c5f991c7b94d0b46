// Products of weights by one or two rows of inputs, for codes that are digits of 2 or 4
// bits, which are looked up without being unpacked.
//
// The points of a vector of bytes are dealt to four vectors of floats: the instruction
// set determines which row of the weight is in which lane.
#pragma once

#include <cstdint>

#include "products/float32_few_rows.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "weight/panel_reader.h"

namespace eqquant {
namespace {

template <class V, class Points, int R, int bits>
class DigitsOfBytes {
 public:
  static constexpr int kDigits = 8 / bits;
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;
  // The number of digits of a byte that are summed at a time: sums should stay in
  // registers.
  static constexpr int kTogether = V::registers > 16 ? kDigits : 2 / R;

  DigitsOfBytes(const Blocks& w, const Points& points, const Numbers<V>& numbers,
                const FewInputs& x)
      : w_(w), points_(points), numbers_(numbers), x_(x) {}

  // Adds the products with piece `i` of `count` rows from row `n` to `sums`. Memory is
  // prefetched `ahead` bytes further.
  EQQUANT_INNERMOST void add(int64_t i, int64_t n, int64_t count, int64_t ahead,
                             float* sums) const {
    Piece<V> piece;
    piece.ahead = ahead;
    Places places = {};
    const uint8_t* at = numbers_.read_runs(i, n, count, piece, places);
    const int64_t start = i * numbers_.codes();
    // Takes bytes each of whose digits stays in one run.
    const bool planes = places.next == 1;
    const int64_t length = piece.run[0].last;
    const int64_t bytes = planes ? smaller(length, places.apart) : length / kDigits;
    const int64_t all = piece.number / kDigits;
    for (int64_t b = 0; b < all; b += bytes) {
      const int64_t here = smaller(bytes, all - b);
      int64_t run[kDigits];
      for (int d = 0; d < kDigits; ++d)
        run[d] = (b * places.next + d * places.apart) / length;
      const Part part = {at + b * w_.stride(),    here,   count,
                         start + b * places.next, places, run};
      unrolled<kDigits / kTogether>([&](auto group) {
        constexpr int d = group * kTogether;
        w_.offset == Offset::kNone ? this->part<false, d>(part, piece, sums)
                                   : this->part<true, d>(part, piece, sums);
      });
    }
  }

 private:
  struct Part {
    const uint8_t* codes;
    int64_t bytes, count;
    int64_t k;  // the position of the first digit of the first byte
    Places places;
    const int64_t* run;  // the run of each digit
  };

  // The same for the digits from `first` on. With `offset`, the number to subtract from
  // codes depends on their run.
  template <bool offset, int first>
  void part(const Part& p, const Piece<V>& piece, float* sums) const {
    typename V::Floats sum[R][kTogether][4], zero[kTogether][4];
    each([&](int r, int d, int v) { sum[r][d][v] = V::zero(); });
    if constexpr (offset)
      for (int d = 0; d < kTogether; ++d) zeros(piece, p.run[first + d], zero[d]);
    const uint8_t* c = p.codes;
    const float* x = x_.x + p.k + first * p.places.apart;
    for (int64_t b = 0; b < p.bytes; ++b, c += w_.stride(), x += p.places.next) {
      prefetch<2>(c + piece.ahead);
      const auto codes =
          p.count == kRows ? V::Bytes::load(c) : V::Bytes::load(c, p.count);
      unrolled<kTogether>([&](auto d) {
        typename V::Floats point[4];
        points_.template look_up<bits*(first + d), bits>(codes, point);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          if constexpr (offset) point[v] = V::sub(point[v], zero[d][v]);
          EQQUANT_UNROLL
          for (int r = 0; r < R; ++r)
            sum[r][d][v] = V::fma(point[v], V::all(x[r * w_.k + d * p.places.apart]),
                                  sum[r][d][v]);
        }
      });
    }
    EQQUANT_UNROLL
    for (int d = 0; d < kTogether; ++d) {
      const int64_t run = p.run[first + d];
      typename V::Floats scale[4], rest[4];
      Points::deal(piece.scale + run * kRows, scale);
      const bool minima = w_.offset == Offset::kMinimum;
      if (minima) Points::deal(piece.rest + run * kRows, rest);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto inputs = V::all(minima ? input_sum(p, r, first + d) : 0);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          float* const to = sums + r * kRows + W * v;
          auto total = V::fma(sum[r][d][v], scale[v], V::load(to));
          if (minima) total = V::fma(rest[v], inputs, total);
          V::store(to, total);
        }
      }
    }
  }

  // Loads the numbers to subtract from the codes of a run.
  void zeros(const Piece<V>& piece, int64_t run, typename V::Floats* found) const {
    alignas(64) float zero[kRows];
    const uint8_t* const from = piece.zero + piece.run[run].first / kRun * kRows;
    for (int64_t i = 0; i < kRows; i += W) {
      auto some = V::to_floats(V::template bytes<false>(from + i));
      if (is_wide(w_)) some = V::add(some, V::load(piece.less + run * kRows + i));
      V::store(zero + i, some);
    }
    Points::deal(zero, found);
  }

  // Returns the sum of the inputs of a digit. Digits side by side share their run, so
  // the first has the sum for all of them.
  float input_sum(const Part& p, int64_t r, int64_t d) const {
    if (p.places.next == 1) {
      const int64_t first = p.k + d * p.places.apart;
      return x_.sum(r, first, first + p.bytes);
    }
    return d == 0 ? x_.sum(r, p.k, p.k + p.bytes * kDigits) : 0;
  }

  template <class F>
  static void each(F f) {
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int d = 0; d < kTogether; ++d) {
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) f(r, d, v);
      }
    }
  }

  const Blocks& w_;
  const Points points_;
  const Numbers<V>& numbers_;
  const FewInputs& x_;
};

template <class V, int R, int bits>
void few_digits(const Blocks& w, const Numbers<V>& numbers, const FewInputs& x,
                int64_t n, int64_t count, float* sums) {
  constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;
  float entries[16];
  const int32_t base = w.offset == Offset::kNone ? w.base : 0;
  for (int i = 0; i < 16; ++i) {
    const int code = i & ((1 << bits) - 1);
    const bool integers = w.point_type == PointType::kIntegers;
    entries[i] = integers ? static_cast<float>(code - base) : w.points[code];
  }
  V::with_digit_points(entries, [&](auto points) {
    using Points = decltype(points);
    const DigitsOfBytes<V, Points, R, bits> product(w, points, numbers, x);
    const int64_t panels = divided_up(count, kRows), each = R * kRows;
    LongSums<V> all(sums, panels * each, w.k, summed_codes(w));
    const int64_t together = numbers.slices();
    for (int64_t first = 0; first < numbers.pieces(); first += together) {
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t ahead = numbers.ahead(p, panels, together);
        for (int64_t i = first; i < smaller(first + together, numbers.pieces()); ++i)
          product.add(i, n + kRows * p, smaller(kRows, count - kRows * p), ahead,
                      sums + p * each);
      }
      all.reach((first + together) * numbers.codes());
    }
    all.finish();
    for (float* at = sums; at < sums + panels * each; at += kRows) {
      typename V::Floats dealt[4];
      for (int v = 0; v < 4; ++v) dealt[v] = V::load(at + v * W);
      Points::collect(dealt, at);
    }
  });
}

// Computes such products, if the weight and the inputs are of this kind. Returns
// whether they are.
template <class V>
bool few_digits(const Blocks& w, const Numbers<V>& numbers, const FewInputs& x,
                int64_t rows, int64_t n, int64_t count, float* sums) {
  // Blocks should end with bytes, and pieces with blocks.
  const bool whole =
      is_gguf(w.packing)
          ? w.k % numbers.codes() == 0
          : w.k % 4 == 0 && (w.block >= w.k || 64 % w.block == 0 || w.block % 64 == 0);
  if (!whole || rows > 2) return false;
  if (numbers.digit() == 4) {
    rows == 1 ? few_digits<V, 1, 4>(w, numbers, x, n, count, sums)
              : few_digits<V, 2, 4>(w, numbers, x, n, count, sums);
    return true;
  }
  if (numbers.digit() != 2 || rows != 1) return false;
  few_digits<V, 1, 2>(w, numbers, x, n, count, sums);
  return true;
}

}  // namespace
}  // namespace eqquant
