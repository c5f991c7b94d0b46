// Products of panels by rows of digits with instructions that multiply two rows of
// eight integers by two others. Results are bit-identical to `IntegersInRegisters`.
#pragma once

#include <cstdint>
#include <cstring>

#include "products/int8.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// Two rows of digits belong to one row of inputs, or to two. (An odd last row is taken
// twice.)
template <class V>
class IntegersInPairs {
 public:
  static constexpr int64_t kRows = Panel<V>::kRows, W = V::width;
  static constexpr int64_t kCodes = kIntegersCodes;
  static constexpr int64_t kWhole = 4;
  static constexpr bool kOnce = false;
  struct Scope {};

  static int64_t scratch(const Blocks&, const Digits&) { return 0; }
  static int64_t rows_of_sums(const Digits& x) { return x.rows; }

  IntegersInPairs(const Blocks& w, const Digits& x, const int32_t* totals, float*,
                  const Parallel&)
      : w_(w), x_(x), totals_(totals) {}

  template <int64_t panels>
  void add(const UnpackedSegments<V>& segments, float* sums,
           const Soon<panels>& soon) const {
    int64_t m = 0;
    auto some = [&](auto rows, auto digits) {
      constexpr int R = decltype(rows)::value;
      for (; m + R <= x_.rows; m += R) {
        const auto mine = soon.part(m / R, divided_up(x_.rows, R));
        int64_t i = 0;
        for (const Unpacked<V>& codes : segments)
          multiply<R, decltype(digits)::value>(m, codes, sums + m * kRows,
                                               mine.part(i++, segments.number));
      }
    };
    if (x_.number == 2) {
      some(Number<4>(), Number<2>());
      some(Number<2>(), Number<2>());
      some(Number<1>(), Number<2>());
    } else {
      some(Number<8>(), Number<1>());
      some(Number<4>(), Number<1>());
      some(Number<2>(), Number<1>());
      some(Number<1>(), Number<1>());
    }
  }

 private:
  // The number of vectors of a panel whose sums stay in registers.
  static constexpr int kVectors = 2;

  // Adds the products of `R` rows of digits with the rows of a panel to `sums`.
  template <int R, int digits, int64_t panels>
  EQQUANT_INNERMOST void multiply(int64_t m, const Unpacked<V>& unpacked, float* sums,
                                  Soon<panels> soon) const {
    constexpr int kPairs = divided_up(R * digits, 2);
    const int64_t fours = unpacked.fours;
    const int64_t each = fours == 0 ? 0 : divided_up(soon.bytes, fours);
    const int8_t* const first = x_.digit + m * x_.stride + unpacked.k;
    int64_t row[2 * kPairs];
    int32_t total[2 * kPairs];
    EQQUANT_UNROLL
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int r = i < R * digits ? i : 0;
      const int64_t of = r % digits * x_.rows + r / digits;
      row[i] = of * x_.stride;
      total[i] = totals_[(of + m) * Segment::number(w_) + unpacked.segment];
    }
    for (int v = 0; v < 4; v += kVectors) {
      const uint8_t* codes = unpacked.codes + v * kRows;
      const int8_t* x = first;
      typename V::Ints sum[kPairs][2 * kVectors];
      // Starting here subtracts the offset from every code.
      const int32_t offset = -Panel<V>::offset(w_);
      EQQUANT_UNROLL
      for (int p = 0; p < kPairs; ++p) {
        EQQUANT_UNROLL
        for (int i = 0; i < 2 * kVectors; ++i)
          sum[p][i] = V::of_pair(offset * total[2 * p], offset * total[2 * p + 1]);
      }
      const auto add = [&](auto last, auto pair) EQQUANT_INLINE {
        typename V::Ints w[2 * kVectors];
        EQQUANT_UNROLL
        for (int i = 0; i < kVectors; ++i)
          V::pairs(V::Bytes::load(codes + i * kRows), last(i), w + 2 * i);
        EQQUANT_UNROLL
        for (int p = 0; p < kPairs; ++p) {
          const auto two = pair(x + row[2 * p], x + row[2 * p + 1]);
          EQQUANT_UNROLL
          for (int i = 0; i < 2 * kVectors; ++i)
            sum[p][i] = V::dot8_pairs(sum[p][i], two, w[i]);
        }
      };
      for (int64_t q = 0; q + 2 <= fours; q += 2, x += 8, codes += 8 * kRows) {
        soon.ask(each);
        add([&](int i) { return V::Bytes::load(codes + (4 + i) * kRows); }, V::pair);
      }
      if (fours % 2 != 0)
        add([](int) { return V::ints(0); },
            [](const int8_t* one, const int8_t* other) {
              int8_t found[2][8] = {};
              std::memcpy(found[0], one, 4);
              std::memcpy(found[1], other, 4);
              return V::pair(found[0], found[1]);
            });
      typename V::Ints products[2 * kPairs][kVectors];
      EQQUANT_UNROLL
      for (int p = 0; p < kPairs; ++p) {
        EQQUANT_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          typename V::Ints two[2];
          V::sums_of_pair(sum[p][2 * i], sum[p][2 * i + 1], two);
          products[2 * p][i] = two[0];
          products[2 * p + 1][i] = two[1];
        }
      }
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        EQQUANT_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          typename V::Ints mine[digits];
          EQQUANT_UNROLL
          for (int d = 0; d < digits; ++d) mine[d] = products[r * digits + d][i];
          add_scaled<V, digits>(w_, unpacked, v + i, mine, total + r * digits,
                                sums + r * kRows + W * (v + i));
        }
      }
    }
  }

  const Blocks& w_;
  const Digits& x_;
  const int32_t* totals_;
};

template <class V>
constexpr void add_int8_pairs(Kernels& found) {
  found.int8_scratch = int8_scratch<V, IntegersInPairs<V>>;
  found.int8 = int8<V, IntegersInPairs<V>>;
}

}  // namespace
}  // namespace eqquant
