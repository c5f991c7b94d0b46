// Splits rows of inputs into parts of three 8-bit digits, which are nearly as exact as
// float32.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "products/round_inputs.h"
#include "weight/quads.h"

namespace eqquant {
namespace {

// The inputs of a row that are in a part of it: inputs whose absolute value has bits
// from `from` to below `end`. `largest` is the largest of them.
struct PartOfRow {
  int64_t row;
  int32_t from, end, largest;
};

// Returns the parts of row `m`: its inputs, and, if some are too large for the digits
// of the others, these as a second part. Returns their number, or 0 if two do not
// suffice.
template <class V>
int64_t parts_of(const float* x, int64_t k, int64_t m, float least,
                        PartOfRow* parts) {
  constexpr int64_t orders = int64_t{6} << 23;
  Range all = Range::of<V>(x, k), ordinary = all;
  const bool two = all.largest >= all.limit;
  if (two) count_outliers<V>(x, k, ordinary);
  // Too small: the unit would be subnormal, which some threads flush to zero.
  const float unit = as_float(ordinary.largest) / 127;
  const bool tiny =
      ordinary.largest >= kSmallest && unit * least < as_float(kSmallest);
  if (tiny || (two && all.largest >= smaller(all.limit + orders, kInfinity))) return 0;
  parts[0] = {m, 0, two ? all.limit : kInfinity, ordinary.largest};
  if (!two) return 1;
  parts[1] = {m, all.limit, kInfinity, all.largest};
  return 2;
}

// Writes the three digits of the inputs of a part, and zeros for the others.
template <class V>
void write_digits(const float* x, int64_t k, const PartOfRow& part, float unit,
                         int64_t stride, int8_t* digit) {
  const auto s = V::all(unit);
  const auto from = V::ints(part.from), end = V::ints(part.end);
  for (int64_t i = 0; i < k; i += V::width) {
    const int64_t here = smaller(V::width, k - i);
    const auto some = V::load(x + i, here);
    const auto a = V::absolute(some);
    auto v = V::only(V::div(some, s),
                     V::without(V::at_least(a, from), V::at_least(a, end)));
    EQQUANT_UNROLL
    for (int d = 0; d < 3; ++d) {
      const auto r = V::nearest(v);
      V::store_bytes(digit + d * stride + i, V::to_ints(r), here);
      v = V::mul(V::sub(v, r), V::all(254));
    }
  }
  for (int d = 0; d < 3; ++d)
    for (int64_t i = k; i < stride; ++i) digit[d * stride + i] = 0;
}

// Brings together the digits for codes that share a lane.
template <int apart>
void order_as_fours(int8_t* digit, int64_t stride) {
  for (int64_t k = 0; k < stride; k += 4 * apart, digit += 4 * apart) {
    int8_t some[4 * apart];
    for (int i = 0; i < 4 * apart; ++i) some[i] = digit[i / 4 + i % 4 * apart];
    __builtin_memcpy(digit, some, sizeof some);
  }
}

inline void order_as_fours(int64_t apart, int8_t* digit, int64_t stride) {
  switch (apart) {
    case 2: return order_as_fours<2>(digit, stride);
    case 4: return order_as_fours<4>(digit, stride);
    case 8: return order_as_fours<8>(digit, stride);
  }
}

template <class V>
int64_t to_parts(const Blocks& w, const float* x, int64_t rows, float least,
                        int64_t stride, int8_t* digit, float* unit, int32_t* before,
                        int64_t* row, int32_t* none, const Parallel& parallel) {
  PartOfRow parts[2 * kFewPartRows];
  int64_t number = 0;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t found = parts_of<V>(x + m * w.k, w.k, m, least, parts + number);
    none[m] = found == 0 ? kNoDigits : 0;
    number += found;
  }
  const int64_t groups = stride / kRun + 1;
  parallel(number, [&](int64_t i, int64_t) {
    const PartOfRow& part = parts[i];
    int8_t* const mine = digit + 3 * i * stride;
    row[i] = part.row;
    unit[i] = part.largest < kSmallest ? 1 : as_float(part.largest) / 127;
    write_digits<V>(x + part.row * w.k, w.k, part, unit[i], stride, mine);
    order_as_fours(apart_in_fours(w.packing), mine, 3 * stride);
    for (int d = 0; d < 3; ++d) {
      int32_t* const sum = before + (3 * i + d) * groups;
      sum[0] = 0;
      for (int64_t g = 0; g + 1 < groups; ++g) {
        const auto* const some =
            reinterpret_cast<const uint8_t*>(mine + d * stride + g * kRun);
        auto lanes = V::template bytes<true>(some);
        for (int64_t j = V::width; j < kRun; j += V::width)
          lanes = V::add(lanes, V::template bytes<true>(some + j));
        sum[g + 1] = sum[g] + V::sum(lanes);
      }
    }
  });
  return number;
}

}  // namespace
}  // namespace eqquant
