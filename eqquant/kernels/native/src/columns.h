// Columns of results: panels of 64 rows of a weight, some of which lie side by side.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

// How many rows of a weight a panel has.
constexpr int64_t kPanelRows = 64;

// How many panels lie side by side: `most`, since memory is read fastest in its order;
// or few, if threads would have none, or the sums of `rows` would not stay in a cache.
constexpr int64_t kFewPanels = 4;

inline int64_t panels_together(int64_t most, const Weight& w, int64_t rows,
                               int64_t workers) {
  const int64_t each = divided_up(w.n, 2 * workers * kPanelRows);
  const bool cached = most * rows * kPanelRows <= 1 << 17;
  return cached && most <= each ? most : smaller(kFewPanels, each);
}

// What will be needed soon: some bytes of panels that lie together. It is asked for a
// bit at a time, while something else is computed.
template <int64_t panels>
struct Soon {
  const uint8_t* at;
  int64_t stride;
  int64_t bytes;

  // The part `i` of `parts`.
  Soon part(int64_t i, int64_t parts) const {
    const int64_t begin = bytes * i / parts, end = bytes * (i + 1) / parts;
    return {at + begin * stride, stride, end - begin};
  }

  void ask(int64_t number) {
    for (; number > 0 && bytes > 0; --number, --bytes, at += stride) {
      EQQUANT_UNROLL
      for (int64_t i = 0; i < panels; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(at + i * kPanelRows), _MM_HINT_T0);
    }
  }
};

// The scales of a block, of `count` rows of a panel and of no others.
inline void scales_of_panel(const Weight& w, int64_t block, int64_t n, int64_t count,
                            __m512* scale) {
  for (int64_t v = 0; v < 4; ++v)
    scale[v] = count <= 16 * v
                   ? _mm512_setzero_ps()
                   : Avx512::scales(w, block, n + 16 * v, smaller(16, count - 16 * v));
}

// Copies what is in `sums`, `each` for a panel, to the columns of `y`.
inline void store_columns(const Weight& w, const float* sums, int64_t each,
                          int64_t rows, int64_t n, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += 16)
    for (int64_t m = 0; m < rows; ++m)
      Avx512::store(
          y + m * w.n + n + i,
          Avx512::load(sums + i / kPanelRows * each + m * kPanelRows + i % kPanelRows),
          smaller(16, count - i));
}

// How many floats `over_columns` needs for sums.
template <int most>
int64_t sums_of_columns(const Weight& w, int64_t rows, int64_t workers) {
  const int64_t together = kPanelRows * panels_together(most, w, rows, workers);
  return smaller(workers, divided_up(w.n, together)) * rows * together;
}

// Calls `columns(panels, n, count, sums)` for all rows of a weight, `count` of them at
// a time: those of so many panels, at most. `sums` are for each of `rows`.
template <int most, class Columns>
void over_columns(const Weight& w, int64_t rows, float* sums, const Parallel& parallel,
                  Columns columns) {
  const int64_t panels = panels_together(most, w, rows, parallel.workers);
  const int64_t together = panels * kPanelRows;
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together, count = smaller(together, w.n - n);
    float* const mine = sums + worker * rows * together;
    if (panels == most)
      columns(Number<most>(), n, count, mine);
    else
      columns(Number<kFewPanels>(), n, count, mine);
  });
}

}  // namespace
}  // namespace eqquant
