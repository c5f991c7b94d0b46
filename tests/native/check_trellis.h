// Encodes random integers by random trellises, and searches again, state by state and
// with 64 bits: no bit may differ.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "arrays/trellis.h"
#include "compare.h"
#include "pool.h"

namespace eqquant {
namespace {

// The states of the best path, of those closed with the bits `seam` if there is one.
inline std::vector<int64_t> best_path(const std::vector<int64_t>& x,
                                      const TrellisEncoding& e, int64_t seam) {
  const int64_t states = int64_t{1} << e.states, groups = states >> e.bits;
  const auto cost = [&](int64_t number, int64_t s) {
    return (number - e.points[s]) * (number - e.points[s]);
  };
  std::vector<int64_t> least(states), next(states);
  std::vector<std::vector<int64_t>> before;
  for (int64_t s = 0; s < states; ++s)
    least[s] = cost(x[0], s) + (seam < 0 || s >> e.bits == seam ? 0 : INT64_C(1) << 40);
  for (size_t t = 1; t < x.size(); ++t) {
    before.emplace_back(groups);
    for (int64_t g = 0; g < groups; ++g) {
      int64_t best = g;
      for (int64_t s = g; s < states; s += groups)
        if (least[s] < least[best]) best = s;
      before.back()[g] = best;
    }
    for (int64_t s = 0; s < states; ++s)
      next[s] = least[before.back()[s >> e.bits]] + cost(x[t], s);
    std::swap(least, next);
  }
  int64_t best = -1;
  for (int64_t s = 0; s < states; ++s)
    if (seam < 0 || s % groups == seam)
      if (best < 0 || least[s] < least[best]) best = s;
  std::vector<int64_t> path = {best};
  for (size_t t = before.size(); t > 0; --t)
    path.push_back(before[t - 1][path.back() >> e.bits]);
  std::reverse(path.begin(), path.end());
  return path;
}

inline void check_trellis(const Pool& pool) {
  TrellisEncoding e = {};
  e.states = static_cast<int32_t>(between(8, chance(0.2) ? 11 : 9));
  e.bits = static_cast<int32_t>(between(1, 8));
  e.tile = 32 * between(1, 8);
  e.rows = between(1, 3), e.size = 32 * between(1, 10);
  const int64_t states = int64_t{1} << e.states, groups = states >> e.bits;
  const Guarded<int16_t> numbers(e.rows * e.size), points(states);
  const Guarded<uint32_t> words(e.rows * e.size / 32 * e.bits);
  const bool far = chance(0.2);
  for (int64_t i = 0; i < e.rows * e.size; ++i)
    numbers.get()[i] = static_cast<int16_t>(
        far ? 600 * (2 * between(0, 1) - 1)
            : std::clamp(150.0f * normal(), -600.0f, 600.0f));
  for (int64_t s = 0; s < states; ++s)
    points.get()[s] = static_cast<int16_t>(between(-510, 510));
  e.numbers = numbers.get(), e.points = points.get(), e.words = words.get();
  pool.parallel()(trellis_tasks(e),
                  [&](int64_t i, int64_t) { encode_trellis(e, i); });
  bool right = true;
  for (int64_t start = 0, at = 0; at < e.rows * e.size; at += start) {
    start = std::min(e.tile, e.size - at % e.size);
    const std::vector<int64_t> forward(e.numbers + at, e.numbers + at + start);
    const std::vector<int64_t> x(forward.rbegin(), forward.rend());
    const int64_t half = std::min<int64_t>(48, start / 2);
    std::vector<int64_t> around(x.end() - half, x.end());
    around.insert(around.end(), x.begin(), x.begin() + half);
    const int64_t seam = best_path(around, e, -1)[half - 1] % groups;
    std::vector<int64_t> path = best_path(x, e, seam);
    std::reverse(path.begin(), path.end());
    for (int64_t i = 0; i < start * e.bits; ++i) {
      const int64_t bit = at * e.bits + i;
      const bool found = e.words[bit / 32] >> (bit % 32) & 1;
      right = right && found == (path[i / e.bits] >> (i % e.bits) & 1);
    }
  }
  if (!right)
    report("AVX2", "trellis", [&] {
      std::printf("states %d, bits %d, size %" PRId64 "\n", e.states, e.bits, e.size);
    });
}

// The loss of a closed path, from its codes: of the differences from targets, and from
// what errors ask.
inline double loss_with_feedback(const TrellisFeedback& e, int64_t row) {
  const int64_t length = e.size * e.bits;
  const uint32_t* const words = e.words + row * length / 32;
  std::vector<double> errors(e.size);
  double loss = 0;
  for (int64_t i = 0; i < e.size; ++i) {
    int64_t state = 0;
    for (int64_t j = 0; j < e.states; ++j) {
      const int64_t bit = ((e.size - 1 - i) * e.bits + j) % length;
      state |= int64_t{words[bit / 32] >> (bit % 32) & 1} << j;
    }
    double target = e.targets[row * e.size + i];
    for (int64_t j = 0; j < i; ++j) target += errors[j] * e.feedback[j * e.size + i];
    errors[i] = e.numbers[row * e.size + i] - e.points[state];
    loss += e.weights[i] * (target - e.points[state]) * (target - e.points[state]);
  }
  return loss;
}

// Without feedback and weights, this is what `encode_trellis` finds, but for what is
// rounded. With them, the loss is less than of codes that know nothing of feedback.
inline void check_trellis_with_feedback(const Pool& pool) {
  TrellisFeedback e = {};
  e.states = static_cast<int32_t>(between(8, chance(0.2) ? 11 : 9));
  e.bits = static_cast<int32_t>(between(1, 8));
  e.rows = between(1, 12), e.size = 32 * between(1, 8);
  const int64_t states = int64_t{1} << e.states, number = e.rows * e.size;
  const Guarded<float> numbers(number), feedback(e.size * e.size), weights(e.size);
  const Guarded<int16_t> points(states), integers(number);
  const Guarded<uint32_t> words(number / 32 * e.bits), apart(number / 32 * e.bits);
  const bool none = chance(0.5);
  for (int64_t i = 0; i < number; ++i) {
    integers.get()[i] =
        static_cast<int16_t>(std::clamp(150.0f * normal(), -600.0f, 600.0f));
    numbers.get()[i] = integers.get()[i];
  }
  for (int64_t s = 0; s < states; ++s)
    points.get()[s] = static_cast<int16_t>(between(-510, 510));
  for (int64_t i = 0; i < e.size; ++i) {
    weights.get()[i] = none ? 1.0f : 0.5f + 0.1f * static_cast<float>(between(0, 10));
    for (int64_t j = 0; j < e.size; ++j)
      feedback.get()[i * e.size + j] = none || j <= i ? 0.0f : 0.15f * normal();
  }
  e.numbers = e.targets = numbers.get(), e.feedback = feedback.get();
  e.weights = weights.get(), e.points = points.get(), e.words = words.get();
  pool.parallel()(trellis_feedback_tasks(e), [&](int64_t i, int64_t) {
    encode_trellis_with_feedback(e, i);
  });
  TrellisEncoding plain = {};
  // (Backwards, since `numbers` are.)
  for (int64_t row = 0; row < e.rows; ++row)
    std::reverse(integers.get() + row * e.size, integers.get() + (row + 1) * e.size);
  plain.numbers = integers.get(), plain.points = points.get();
  plain.words = apart.get();
  plain.rows = e.rows, plain.size = plain.tile = e.size;
  plain.states = e.states, plain.bits = e.bits;
  pool.parallel()(trellis_tasks(plain),
                  [&](int64_t i, int64_t) { encode_trellis(plain, i); });
  double fed = 0, other = 0;
  for (int64_t row = 0; row < e.rows; ++row) fed += loss_with_feedback(e, row);
  e.words = apart.get();
  for (int64_t row = 0; row < e.rows; ++row) other += loss_with_feedback(e, row);
  if (none ? std::abs(fed - other) > 0.05 * other + 1 : !(fed < 1.2 * other))
    report("AVX2", "trellis with feedback", [&] {
      std::printf("states %d, bits %d, size %" PRId64 ": %f, %f\n", e.states, e.bits,
                  e.size, fed, other);
    });
}

}  // namespace
}  // namespace eqquant
