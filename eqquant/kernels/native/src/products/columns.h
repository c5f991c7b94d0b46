// Splits a product into columns: panels of 64 rows of the weight. A task takes several
// adjacent panels.
#pragma once

#include <cstdint>

#include "products/kernels.h"
#include "products/long_sums.h"

namespace eqquant {
namespace {

// The number of adjacent panels of a task: `most`, since long runs of consecutive
// memory are read fastest. Fewer if some threads would otherwise have no task, or if
// the sums of `rows` would not stay in cache.
constexpr int64_t kFewPanels = 4;

inline int64_t panels_together(int64_t most, const Blocks& w, int64_t rows,
                               int64_t workers) {
  const int64_t each = divided_up(w.n, 2 * workers * kPanelRows);
  const bool cached = most * rows * kPanelRows <= 1 << 17;
  return cached && most <= each ? most : smaller(kFewPanels, each);
}

// The codes that a task needs next: some bytes of adjacent panels. They are prefetched
// a few at a time, between the instructions of the current product.
template <int64_t panels>
struct Soon {
  const uint8_t* at;
  int64_t stride;
  int64_t bytes;

  // Part `i` of `parts`.
  Soon part(int64_t i, int64_t parts) const {
    const int64_t begin = bytes * i / parts, end = bytes * (i + 1) / parts;
    return {at + begin * stride, stride, end - begin};
  }

  template <int cache = 1>
  void ask(int64_t number) {
    for (; number > 0 && bytes > 0; --number, --bytes, at += stride) {
      EQQUANT_UNROLL
      for (int64_t i = 0; i < panels; ++i)
        prefetch<cache>(at + i * kPanelRows);
    }
  }
};

// Stores the scales of a block for the `count` rows of a panel, and zeros for missing
// rows.
template <class V>
void scales_of_panel(const Blocks& w, int64_t block, int64_t n, int64_t count,
                     typename V::Floats* scale) {
  constexpr int64_t W = V::width;
  for (int64_t v = 0; v < 4; ++v)
    scale[v] = count <= W * v
                   ? V::zero()
                   : V::scales(w.scales, block, n + W * v, smaller(W, count - W * v));
}

// Copies the sums of panels, `each` floats apart, to the columns of `y`.
template <class V>
void store_columns(const Blocks& w, const float* sums, int64_t each, int64_t rows,
                   int64_t n, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += V::width)
    for (int64_t m = 0; m < rows; ++m)
      V::store(
          y + m * w.n + n + i,
          V::load(sums + i / kPanelRows * each + m * kPanelRows + i % kPanelRows),
          smaller(V::width, count - i));
}

// Returns the number of floats of `LongSums` of `rows` rows with `columns` rows of a
// weight.
template <class V>
int64_t floats_of_sums(const Blocks& w, int64_t rows, int64_t columns) {
  return LongSums<V>::floats(rows * columns,
                             w.in_bytes.row * codes_per_byte(w.packing));
}

// Returns the number of floats that `over_columns` needs for sums.
template <class V, int most>
int64_t sums_of_columns(const Blocks& w, int64_t rows, int64_t workers) {
  const int64_t together = kPanelRows * panels_together(most, w, rows, workers);
  return smaller(workers, divided_up(w.n, together)) *
         floats_of_sums<V>(w, rows, together);
}

// Calls `columns(panels, n, count, sums)` in parallel for all rows of a weight, `count`
// rows at a time from row `n`, in up to `panels` panels. `sums` are `LongSums` of each
// of these rows and each of the `rows` of inputs.
template <class V, int most, class Columns>
void over_columns(const Blocks& w, int64_t rows, float* sums, const Parallel& parallel,
                  Columns columns) {
  const int64_t panels = panels_together(most, w, rows, parallel.workers);
  const int64_t together = panels * kPanelRows;
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together, count = smaller(together, w.n - n);
    float* const mine = sums + worker * floats_of_sums<V>(w, rows, together);
    if (panels == most)
      columns(Number<most>(), n, count, mine);
    else
      columns(Number<kFewPanels>(), n, count, mine);
  });
}

}  // namespace
}  // namespace eqquant
