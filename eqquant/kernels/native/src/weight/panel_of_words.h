// Some codes of the rows of a panel, as what 16-bit integer products take.
#pragma once

#include <cstdint>

#include "weight/panel_reader.h"

namespace eqquant {
namespace {

// The most codes of a row that are multiplied at a time: what is decoded fits in the
// first cache.
constexpr int64_t kWordsCodes = 160;

// Two codes of a row side by side as 16-bit integers. Each run of them has a scale, and
// with minima, what is left of these once a part of them went into the integers.
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
