// Encodes random numbers, those of a row one below another or side by side, and a row
// alone: no bit may differ.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "arrays/encode.h"
#include "compare.h"
#include "pool.h"

namespace eqquant {
namespace {

// What formats there are, and some numbers of their own.
struct Searched {
  Search search;
  int64_t block, part;
  int32_t codes, steps;
};

constexpr Searched all_searched[] = {
    {Search::kIntegers, 256, 16, 64, 256},      {Search::kIntegers, 256, 16, 8, 64},
    {Search::kPoints, 256, 32, 16, 64},         {Search::kPoints, 32, 32, 16, 0},
    {Search::kRanges, 256, 32, 16, 64},         {Search::kRanges, 256, 32, 32, 64},
    {Search::kAbsoluteRanges, 256, 16, 4, 16},
};

void check_encode(const Pool& pool) {
  const Searched format = all_searched[between(0, 6)];
  const auto type = static_cast<NumberType>(between(0, 2));
  const int64_t size = type == NumberType::kFloat32 ? 4 : 2;
  Encoding e = {};
  e.type = type;
  e.matrices = between(1, 2), e.rows = between(1, chance(0.3) ? 200 : 20);
  e.size = between(1, 600);
  e.block = format.block, e.part = format.part, e.repeats = chance(0.5);
  e.search = format.search, e.codes = format.codes, e.steps = format.steps;
  const bool ranges = e.search >= Search::kRanges;
  std::vector<float> factors, points;
  for (int i = 0; i < 20; ++i) {
    const float last = static_cast<float>(e.codes - 1) + 0.1f * static_cast<float>(i);
    factors.push_back(ranges ? last : -last / 2);
  }
  for (int i = 0; i < 16; ++i) points.push_back(static_cast<float>(17 * i - 127));
  e.factors = factors.data(), e.candidates = 20, e.points = points.data();
  // The bytes of a block are those that are computed, one after another.
  const int64_t parts = e.block / e.part, halves = e.block + 2 * parts;
  std::vector<StoredBits> bits;
  const auto stored = [&](int64_t from, int64_t number) {
    for (int64_t i = from; i < from + number; ++i)
      bits.push_back(
          {static_cast<int32_t>(i), 0, 8, static_cast<int32_t>(bits.size()), 0});
  };
  stored(0, e.block);
  if (e.steps != 0) stored(e.block, ranges ? 2 * parts : parts);
  stored(halves, ranges ? 4 : 2);
  e.bits = bits.data(), e.number = e.bytes = static_cast<int64_t>(bits.size());

  const int64_t number = e.matrices * e.rows * e.size;
  const Guarded<uint8_t> along(number * size), across(number * size);
  for (int64_t i = 0; i < number; ++i) {
    // (As bfloat16, or as float16, the upper half is as good.)
    const float x = chance(0.1) ? 0.0f : chance(0.1) ? 1e-40f : 10 * normal();
    uint8_t bytes[4];
    std::memcpy(bytes, &x, 4);
    const int64_t row = i / e.size % e.rows, first = i / e.size / e.rows * e.rows;
    const int64_t other = first * e.size + i % e.size * e.rows + row;
    std::memcpy(along.get() + i * size, bytes + 4 - size, size);
    std::memcpy(across.get() + other * size, bytes + 4 - size, size);
  }
  const int64_t height = divided_up(e.size, e.block) * e.bytes;
  const Guarded<uint8_t> blocks(e.matrices * height * e.rows),
      others(e.matrices * height * e.rows);
  const auto run = [&](const uint8_t* numbers, bool is_across, uint8_t* to) {
    e.numbers = numbers, e.across = is_across, e.blocks = to;
    pool.parallel()(encoding_tasks(e), [&](int64_t i, int64_t) { encode(e, i); });
  };
  run(along.get(), false, blocks.get());
  run(across.get(), true, others.get());
  const int64_t all = e.matrices * height * e.rows;
  bool right = std::memcmp(blocks.get(), others.get(), all) == 0;
  const int64_t rows = e.rows, row = between(0, rows - 1);
  const Guarded<uint8_t> alone(height);
  e.matrices = e.rows = 1;
  run(along.get() + row * e.size * size, false, alone.get());
  for (int64_t i = 0; i < height; ++i)
    right = right && alone.get()[i] == blocks.get()[i * rows + row];
  if (!right)
    report("AVX2", "encode", [&] {
      std::printf("search %d, type %d, rows %" PRId64 ", size %" PRId64 "\n",
                  static_cast<int>(e.search), static_cast<int>(type), rows, e.size);
    });
}

}  // namespace
}  // namespace eqquant
