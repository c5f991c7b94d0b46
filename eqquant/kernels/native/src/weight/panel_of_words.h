// Some codes of the rows of a panel, as operands of 16-bit integer products.
#pragma once

#include <cstdint>

#include "weight/panel_reader.h"

namespace eqquant {
namespace {

// The most codes of a row that are multiplied at a time: the decoded codes fit in the
// first cache.
constexpr int64_t kWordsCodes = 160;

// Two codes of a row side by side as 16-bit integers. Each run of them has a scale, and
// with minima, the rest of the minimum that is not part of the integers.
template <class V>
struct PanelOfWords {
  static constexpr int64_t kRows = Numbers<V>::kRows;

  int64_t number, runs;
  Run run[kWordsCodes / kRun];
  alignas(64) int32_t pairs[kWordsCodes / 2 * kRows];
  alignas(64) float scale[kWordsCodes / kRun * kRows];
  alignas(64) float rest[kWordsCodes / kRun * kRows];
};

}  // namespace
}  // namespace eqquant
