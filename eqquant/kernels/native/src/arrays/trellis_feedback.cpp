// The Viterbi algorithm with error feedback, like `nearest_paths_with_feedback` in
// `formats/_viterbi.py`. Each surviving path has its own targets, corrected for its own
// errors. `pending_` holds the corrected targets of the next few numbers for each path,
// and moves with it. Every `kPending` numbers, it is computed again from all errors.
// This is cheap, since paths share most of their past: they are a tree with few nodes.
#include <algorithm>
#include <cstring>

#include "arrays/trellis.h"
#include "arrays/trellis_path.h"
#include "isa/basics.h"

namespace eqquant {
namespace {

using V = EQQUANT_SET;
using Floats = V::Floats;
using Ints = V::Ints;

constexpr int64_t kLanes = V::width;
// The number of tiles in a task, which share its buffers.
constexpr int64_t kTiles = 8;
// How many numbers before and after a seam are searched to choose its state.
constexpr int64_t kAround = 48;
// How many targets are pending at a time.
constexpr int64_t kPending = 16;
constexpr int32_t kNoSeam = -1;
// Padding: a table loads as many numbers, from any group on.
constexpr int64_t kMore = 8;
// The initial cost of paths that do not start at the seam.
constexpr float kNever = 1e20f;

class FeedbackSearch {
 public:
  explicit FeedbackSearch(const TrellisFeedback& e)
      : e_(e),
        states_(int64_t{1} << e.states),
        groups_(states_ >> e.bits),
        codes_(int64_t{1} << e.bits),
        points_(states_),
        best_{Array<float>(groups_ + kMore), Array<float>(groups_ + kMore)},
        targets_(groups_ + kMore),
        pending_{Array<float>(groups_ * kPending), Array<float>(groups_ * kPending)},
        found_(most(e) * groups_),
        nodes_(most(e) * groups_),
        parents_(most(e) * groups_),
        seen_(groups_),
        place_(groups_),
        numbers_(e.size),
        around_(2 * kAround),
        path_(most(e)) {
    if (failed()) return;
    for (int64_t s = 0; s < states_; ++s) points_[s] = e.points[s];
    for (int64_t g = 0; g < groups_ + kMore; ++g)
      best_[0][g] = best_[1][g] = targets_[g] = 0;
    for (int64_t g = 0; g < groups_; ++g) seen_[g] = 0;
  }

  bool failed() const {
    return points_.failed() || best_[0].failed() || best_[1].failed() ||
           targets_.failed() || pending_[0].failed() || pending_[1].failed() ||
           found_.failed() || nodes_.failed() || parents_.failed() || seen_.failed() ||
           place_.failed() || numbers_.failed() || around_.failed() || path_.failed();
  }

  void encode(int64_t row) {
    const float* const targets = e_.targets + row * e_.size;
    const int64_t size = e_.size, half = smaller(kAround, size / 2);
    for (int64_t i = 0; i < 2 * half; ++i)
      around_[i] = targets[i < half ? size - half + i : i - half];
    search(around_.get(), nullptr, 2 * half, kNoSeam);
    const auto seam = static_cast<int32_t>(path_[half - 1] & (groups_ - 1));
    search(targets, e_.numbers + row * e_.size, size, seam);
    write_path(path_.get(), size, e_.bits, e_.words + row * e_.size / 32 * e_.bits);
  }

 private:
  static int64_t most(const TrellisFeedback& e) { return larger(e.size, 2 * kAround); }

  // Finds the best path for `targets`. Errors are relative to `numbers`. If this is
  // null, there is no feedback.
  void search(const float* targets, const float* numbers, int64_t size, int32_t seam) {
    for (int64_t g = 0; g < groups_; ++g)
      best_[1][g] = seam == kNoSeam || g == seam ? 0 : kNever;
    float lowest = 0;
    int now = 0;
    for (int64_t t = 0; t < size; ++t) {
      const int64_t at = t % kPending;
      if (numbers == nullptr)
        std::fill_n(targets_.get(), groups_, targets[t]);
      else if (at == 0)
        look_back(targets, numbers, t, pending_[now].get());
      const float* const from = best_[(t + 1) % 2].get();
      float* const to = best_[t % 2].get();
      uint8_t* const found = found_.get() + t * groups_;
      const float weight = numbers == nullptr ? 1 : e_.weights[t];
      if (groups_ < kLanes)
        lowest = few_groups(weight, lowest, from, to, found);
      else if (e_.bits == 1)
        lowest = step<1>(weight, lowest, from, to, found);
      else if (e_.bits == 2)
        lowest = step<2>(weight, lowest, from, to, found);
      else
        lowest = step<3>(weight, lowest, from, to, found);
      if (numbers != nullptr && at + 1 < kPending) {
        move(numbers[t], t, found, pending_[now].get(), pending_[1 - now].get());
        now = 1 - now;
      }
    }
    const float* const last = best_[(size + 1) % 2].get();
    trace(size, seam == kNoSeam ? std::min_element(last, last + groups_) - last : seam);
  }

  // The state after number `t` of the best path to a group.
  int64_t state_of(int64_t t, int64_t group) const {
    return group | int64_t{found_[t * groups_ + group]} * groups_;
  }

  // A step for trellises with fewer groups than a vector has lanes.
  float few_groups(float weight, float less, const float* from, float* to,
                   uint8_t* found) const {
    float lowest = kNever;
    for (int64_t g = 0; g < groups_; ++g) {
      float least = 2 * kNever;
      for (int64_t code = 0; code < codes_; ++code) {
        const int64_t s = g + code * groups_, before = s >> e_.bits;
        const float difference = targets_[before] - points_[s];
        const float cost = from[before] - less + difference * weight * difference;
        if (cost < least) least = cost, found[g] = static_cast<uint8_t>(code);
      }
      to[g] = least;
      lowest = std::min(lowest, least);
    }
    return lowest;
  }

  // A step for all other trellises. `bits` is 3 for 3 bits and more. Costs are not
  // negative, so their bits compare as integers in the same order. The lowest bits are
  // replaced by the code.
  template <int bits>
  float step(float weight, float less, const float* from, float* to,
             uint8_t* found) const {
    const auto mask = static_cast<int32_t>(codes_ - 1);
    const int shift = bits < 3 ? bits : e_.bits;
    alignas(64) int32_t each[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) each[i] = static_cast<int32_t>(i >> bits);
    const Ints order = V::load(each);
    const Floats weights = V::all(weight), lower = V::all(less);
    const auto of_states = [&](const float* p) EQQUANT_INLINE {
      if constexpr (kLanes >> bits > 1)
        return typename V::Table8(p)[order];
      else
        return V::all(*p);
    };
    const auto keys = [&](int64_t s, int32_t code) EQQUANT_INLINE {
      const int64_t before = s >> shift;
      const Floats cost = V::sub(of_states(from + before), lower);
      const Floats difference =
          V::sub(of_states(targets_.get() + before), V::load(points_.get() + s));
      const Floats key = V::fma(V::mul(difference, weights), difference, cost);
      return V::either(V::both(V::as_ints(key), ~mask), V::ints(code));
    };
    Ints lowest = V::ints(INT32_MAX);
    for (int64_t g = 0; g < groups_; g += kLanes) {
      Ints best = keys(g, 0);
      for (int64_t code = 1; code < codes_; ++code)
        best = V::min(best, keys(g + code * groups_, static_cast<int32_t>(code)));
      const Ints code = V::both(best, mask);
      V::store_low_bytes(found + g, code);
      best = V::minus(best, code);
      lowest = V::min(lowest, best);
      V::store(to + g, V::as_floats(best));
    }
    alignas(64) float least[kLanes];
    V::store(least, V::as_floats(lowest));
    return *std::min_element(least, least + kLanes);
  }

  // Updates the pending targets of each path after number `t`: copies them from the
  // path that it continues, and adds the feedback of its newest error.
  void move(float number, int64_t t, const uint8_t* found, const float* from,
            float* to) const {
    const int64_t at = t % kPending, first = t - at;
    const float* const asked = e_.feedback + t * e_.size + first;
    // Targets before the next one are no longer used.
    const int64_t begin = (at + 1) / kLanes * kLanes;
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t s = g | int64_t{found[g]} * groups_;
      const Floats error = V::all(number - points_[s]);
      const float* const before = from + (s >> e_.bits) * kPending;
      float* const after = to + g * kPending;
      for (int64_t i = begin; i < kPending; i += kLanes)
        V::store(after + i, V::fma(error, V::load(asked + i), V::load(before + i)));
      targets_[g] = after[at + 1];
    }
  }

  // Computes the pending targets of each path from number `t` on, from all its errors.
  void look_back(const float* targets, const float* numbers, int64_t t, float* pending) {
    float* now = pending;
    if (t == 0) {
      for (int64_t g = 0; g < groups_; ++g)
        std::copy_n(targets, kPending, now + g * kPending);
      std::fill_n(targets_.get(), groups_, targets[0]);
      return;
    }
    // Go back from the last number to the one where all paths meet. Collect the nodes
    // on any path, and the index of each node's parent.
    int64_t layer = t - 1, count = groups_;
    for (int64_t g = 0; g < groups_; ++g)
      nodes_[layer * groups_ + g] = static_cast<uint16_t>(g);
    for (; count > 1 && layer > 0; --layer) {
      const uint16_t* const these = nodes_.get() + layer * groups_;
      uint16_t* const those = nodes_.get() + (layer - 1) * groups_;
      uint16_t* const parents = parents_.get() + layer * groups_;
      ++stamp_;
      int64_t number = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t group = state_of(layer, these[i]) >> e_.bits;
        if (seen_[group] != stamp_) {
          seen_[group] = stamp_;
          place_[group] = static_cast<uint16_t>(number);
          those[number++] = static_cast<uint16_t>(group);
        }
        parents[i] = place_[group];
      }
      counts_[layer] = count;
      count = number;
    }
    counts_[layer] = count;
    // The targets with the feedback of the past that all paths share.
    alignas(64) float common[kPending];
    std::copy_n(targets + t, kPending, common);
    if (count == 1) {
      int64_t group = nodes_[layer * groups_];
      for (int64_t i = layer; i > 0; --i) {
        group = state_of(i, group) >> e_.bits;
        ask(numbers[i - 1] - points_[state_of(i - 1, group)], i - 1, t, common, common);
      }
    }
    float* next = pending == pending_[0].get() ? pending_[1].get() : pending_[0].get();
    // Swap if necessary, so that the last step writes to `pending`.
    if ((t - 1 - layer) % 2 != 0) std::swap(now, next);
    for (int64_t i = 0; i < count; ++i)
      ask_node(numbers, layer, i, t, common, now + i * kPending);
    for (int64_t j = layer + 1; j < t; ++j) {
      for (int64_t i = 0; i < counts_[j]; ++i)
        ask_node(numbers, j, i, t, now + parents_[j * groups_ + i] * kPending,
                 next + i * kPending);
      std::swap(now, next);
    }
    for (int64_t g = 0; g < groups_; ++g) targets_[g] = pending[g * kPending];
  }

  void ask_node(const float* numbers, int64_t layer, int64_t i, int64_t t,
                const float* from, float* to) const {
    const int64_t s = state_of(layer, nodes_[layer * groups_ + i]);
    ask(numbers[layer] - points_[s], layer, t, from, to);
  }

  // Adds the feedback of an error at number `j` to the targets from `t` on.
  void ask(float error, int64_t j, int64_t t, const float* from, float* to) const {
    const float* const asked = e_.feedback + j * e_.size + t;
    for (int64_t i = 0; i < kPending; i += kLanes)
      V::store(to + i, V::fma(V::all(error), V::load(asked + i), V::load(from + i)));
  }

  void trace(int64_t size, int64_t group) {
    for (int64_t t = size - 1; t >= 0; --t) {
      const int64_t state = state_of(t, group);
      path_[t] = static_cast<uint16_t>(state);
      group = state >> e_.bits;
    }
  }

  const TrellisFeedback& e_;
  const int64_t states_, groups_, codes_;
  const Array<float> points_;
  // For the best path to each group: its cost, its next target, and all its pending
  // targets.
  const Array<float> best_[2];
  const Array<float> targets_;
  const Array<float> pending_[2];
  const Array<uint8_t> found_;
  // For each number: the groups on any path, and the indices of their parents.
  const Array<uint16_t> nodes_, parents_;
  int64_t counts_[kMostFeedback];
  const Array<int32_t> seen_;
  const Array<uint16_t> place_;
  int32_t stamp_ = 0;
  const Array<float> numbers_, around_;
  const Array<uint16_t> path_;
};

}  // namespace

int64_t trellis_feedback_tasks(const TrellisFeedback& e) {
  return divided_up(e.rows, kTiles);
}

bool encode_trellis_with_feedback(const TrellisFeedback& e, int64_t task) {
  FeedbackSearch search(e);
  if (search.failed()) return false;
  for (int64_t i = task * kTiles; i < smaller(e.rows, (task + 1) * kTiles); ++i)
    search.encode(i);
  return true;
}

}  // namespace eqquant
