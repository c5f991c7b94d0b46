// Splits the rows of inputs of a product.
#pragma once

#include <cstdint>

#include "isa/basics.h"

namespace eqquant {
namespace {

// Calls `some(m, number)` for `number` rows of inputs from row `m`, until all rows are
// done: enough at a time that decoding a weight for them takes little time, but not so
// many that their sums leave the second cache.
template <class Some>
void in_some_rows(int64_t rows, Some some) {
  constexpr int64_t each = 128;
  int64_t m = 0;
  for (; rows - m >= 2 * each; m += each) some(m, each);
  some(m, rows - m);
}

// Calls `few(Number<R>(), m)` for `R` rows of inputs from row `m`, until all rows are
// done: so few that their sums with four vectors of rows of the weight stay in
// registers.
template <class V, class Few>
EQQUANT_INLINE inline void in_few_rows(int64_t rows, Few few) {
  int64_t m = 0;
  const auto each = [&](auto number) EQQUANT_INLINE {
    constexpr int R = decltype(number)::value;
    // (Two rows would wait for their sums, so eight rows are taken as twice four.)
    for (; m + R <= rows && !(R == 6 && m + 8 == rows); m += R) few(number, m);
  };
  if constexpr (V::registers > 16) {
    each(Number<6>());
    each(Number<4>());
  }
  each(Number<2>());
  each(Number<1>());
}

}  // namespace
}  // namespace eqquant
