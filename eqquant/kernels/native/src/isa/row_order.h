// The places of the numbers of a weight's rows in memory.
#pragma once

#include <cstdint>

namespace eqquant {

// The number of rows of a weight in a panel.
constexpr int64_t kPanelRows = 64;

// The number `j` of row `i` is at `place(j, i)`. Rows lie side by side: all of them, or
// the rows of each panel, with one panel after another.
//
// (The functions are always inlined, since they have external linkage: see
// `isa/basics.h`.)
struct RowOrder {
  int64_t stride;  // from a number of a row to the next
  int64_t panel;   // from a panel to the next

  [[gnu::always_inline]] static RowOrder side_by_side(int64_t n) {
    return {n, kPanelRows};
  }
  [[gnu::always_inline]] static RowOrder in_panels(int64_t numbers) {
    return {kPanelRows, numbers * kPanelRows};
  }

  [[gnu::always_inline]] int64_t place(int64_t j, int64_t i) const {
    return i / kPanelRows * panel + j * stride + i % kPanelRows;
  }
};

}  // namespace eqquant
