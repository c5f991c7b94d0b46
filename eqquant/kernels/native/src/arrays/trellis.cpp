// The Viterbi algorithm, tile by tile. Each vector instruction handles one state per
// lane. The computation is the same as in `formats/_viterbi.py`, which explains keys
// and why they fit in 32 bits. The search goes backwards, since in a state the bits of
// later codes are above its own.
#include "arrays/trellis.h"

#include <algorithm>
#include <cstring>

#include "arrays/trellis_path.h"
#include "isa/basics.h"

namespace eqquant {
namespace {

using V = EQQUANT_SET;
using Ints = V::Ints;

constexpr int64_t kLanes = V::width;
// The number of tiles in a task, which share its buffers.
constexpr int64_t kTiles = 8;
// How many numbers before and after a seam are searched to choose its state.
constexpr int64_t kAround = 48;
constexpr int32_t kMostNumber = 600, kMostPoint = 510;
constexpr int32_t kNoSeam = -1;
// Padding: a table loads as many numbers, from any group on.
constexpr int64_t kMore = 8;

int64_t tiles_of_row(const TrellisEncoding& e) { return divided_up(e.size, e.tile); }

class Search {
 public:
  explicit Search(const TrellisEncoding& e)
      : e_(e),
        states_(int64_t{1} << e.states),
        groups_(states_ >> e.bits),
        codes_(int64_t{1} << e.bits),
        squares_(states_),
        factors_(states_),
        best_{Array<float>(groups_ + kMore), Array<float>(groups_ + kMore)},
        found_(e.tile * groups_),
        numbers_(e.tile),
        path_(e.tile) {
    if (failed()) return;
    for (int64_t s = 0; s < states_; ++s) {
      const int32_t point = e.points[s] + kMostPoint;
      const auto last = static_cast<int32_t>(s >> (e.states - e.bits));
      squares_[s] = ((point * point) << e.bits) + last;
      factors_[s] = point << above();
    }
    for (const auto& best : best_)
      for (int64_t g = 0; g < groups_ + kMore; ++g) best[g] = 0;
  }

  bool failed() const {
    return squares_.failed() || factors_.failed() || best_[0].failed() ||
           best_[1].failed() || found_.failed() || numbers_.failed() || path_.failed();
  }

  void encode(int64_t tile) {
    const int64_t row = tile / tiles_of_row(e_), at = tile % tiles_of_row(e_) * e_.tile;
    const int64_t size = smaller(e_.tile, e_.size - at);
    const int16_t* const from = e_.numbers + row * e_.size + at;
    const int64_t half = smaller(kAround, size / 2);
    for (int64_t i = 0; i < 2 * half; ++i)
      numbers_[i] = from[i < half ? half - 1 - i : size - 1 - (i - half)] + kMostPoint;
    search(2 * half, kNoSeam);
    const auto seam = static_cast<int32_t>(path_[half - 1] & (groups_ - 1));
    for (int64_t i = 0; i < size; ++i) numbers_[i] = from[size - 1 - i] + kMostPoint;
    search(size, seam);
    uint32_t* const words = e_.words + (row * e_.size + at) * e_.bits / 32;
    write_path(path_.get(), size, e_.bits, words);
  }

 private:
  // Costs are shifted left by `bits`. This is the part of the shift that points get;
  // numbers get the rest. So both factors of a product fit in 16 bits.
  int above() const { return std::min(e_.bits, 5); }

  // Finds the best path for the first `size` numbers. States with the same successors
  // form a group. After each number, only the least key of each group is stored, since
  // the best path cannot go through the others.
  void search(int64_t size, int32_t seam) {
    int32_t lowest = first(seam);
    for (int64_t t = 1; t + 1 < size; ++t) {
      const float* const from = best_[(t - 1) % 2].get();
      float* const to = best_[t % 2].get();
      uint8_t* const found = found_.get() + t * groups_;
      if (groups_ < kLanes)
        lowest = few_groups(numbers_[t], lowest, from, to, found);
      else if (e_.bits == 1)
        lowest = step<1>(numbers_[t], lowest, from, to, found);
      else if (e_.bits == 2)
        lowest = step<2>(numbers_[t], lowest, from, to, found);
      else
        lowest = step<3>(numbers_[t], lowest, from, to, found);
    }
    trace(size, last(size - 1, seam));
  }

  // The squared difference of number and point, and below it the bits that identify the
  // state, as in a key.
  int32_t cost(int32_t x, int64_t state) const {
    return ((x * x) << e_.bits) + squares_[state] -
           factors_[state] * (2 * x * (1 << (e_.bits - above())));
  }

  // Computes the least keys of groups after the first number. Returns the least of all.
  int32_t first(int32_t seam) {
    const auto steps = static_cast<int32_t>(divided_up(e_.states, e_.bits));
    const int32_t most = kMostNumber + kMostPoint;
    const int32_t never = (steps * most * most) << e_.bits;
    const auto key = [&](int64_t s) {
      const bool allowed = seam == kNoSeam || s >> e_.bits == seam;
      return cost(numbers_[0], s) + (allowed ? 0 : never);
    };
    return each_group(key, best_[0].get(), found_.get());
  }

  // Finds the least key of each group. The low bits of a key, which identify the state,
  // go to `found`, and the rest to `to`.
  template <class Key>
  int32_t each_group(const Key& key, float* to, uint8_t* found) const {
    int32_t lowest = INT32_MAX;
    for (int64_t g = 0; g < groups_; ++g) {
      int32_t best = key(g);
      for (int64_t s = g + groups_; s < states_; s += groups_)
        best = std::min(best, key(s));
      found[g] = static_cast<uint8_t>(best & (codes_ - 1));
      best -= found[g];
      set(to + g, best);
      lowest = std::min(lowest, best);
    }
    return lowest;
  }

  // The key of a state after the next number. `less`, the least of the earlier keys, is
  // subtracted, so that keys do not overflow.
  int32_t key(int32_t x, int32_t less, const float* from, int64_t state) const {
    return get(from + (state >> e_.bits)) - less + cost(x, state);
  }

  // A step for trellises with fewer groups than a vector has lanes.
  int32_t few_groups(int32_t x, int32_t less, const float* from, float* to,
                     uint8_t* found) const {
    return each_group([&](int64_t s) { return key(x, less, from, s); }, to, found);
  }

  // A step for all other trellises. `bits` is 3 for 3 bits and more.
  template <int bits>
  int32_t step(int32_t x, int32_t less, const float* from, float* to,
               uint8_t* found) const {
    const int32_t factor = -2 * x * (1 << (e_.bits - above()));
    const Ints more = V::ints(((x * x) << e_.bits) - less);
    const auto mask = static_cast<int32_t>(codes_ - 1);
    const int shift = bits < 3 ? bits : e_.bits;
    alignas(64) int32_t each[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) each[i] = static_cast<int32_t>(i >> bits);
    const Ints order = V::load(each);
    const auto keys = [&](int64_t s) EQQUANT_INLINE {
      const float* const before = from + (s >> shift);
      Ints key;
      if constexpr (kLanes >> bits > 1)
        key = V::as_ints(typename V::Table8(before)[order]);
      else
        key = V::as_ints(V::all(*before));
      key = V::add(key, V::load(squares_.get() + s));
      return V::add(key, V::times(V::load(factors_.get() + s), factor));
    };
    Ints lowest = V::ints(INT32_MAX);
    for (int64_t g = 0; g < groups_; g += kLanes) {
      Ints best = keys(g);
      for (int64_t s = g + groups_; s < states_; s += groups_)
        best = V::min(best, keys(s));
      const Ints code = V::both(best, mask);
      V::store_low_bytes(found + g, code);
      best = V::add(V::minus(best, code), more);
      lowest = V::min(lowest, best);
      V::store(to + g, V::as_floats(best));
    }
    V::store(each, lowest);
    return *std::min_element(each, each + kLanes);
  }

  // The best state after `t`, the last number.
  int64_t last(int64_t t, int32_t seam) const {
    const float* const from = best_[(t - 1) % 2].get();
    const int64_t step = seam == kNoSeam ? 1 : groups_;
    int64_t state = seam == kNoSeam ? 0 : seam;
    int32_t least = key(numbers_[t], 0, from, state);
    for (int64_t s = state + step; s < states_; s += step) {
      const int32_t other = key(numbers_[t], 0, from, s);
      if (other < least) least = other, state = s;
    }
    return state;
  }

  void trace(int64_t size, int64_t state) {
    for (int64_t t = size - 1;; --t) {
      path_[t] = static_cast<uint16_t>(state);
      if (t == 0) return;
      const int64_t group = state >> e_.bits;
      state = group | int64_t{found_[(t - 1) * groups_ + group]} * groups_;
    }
  }

  // `best_` stores the bits of integers in floats.
  static int32_t get(const float* p) {
    int32_t found;
    std::memcpy(&found, p, sizeof(found));
    return found;
  }
  static void set(float* p, int32_t x) { std::memcpy(p, &x, sizeof(x)); }

  const TrellisEncoding& e_;
  const int64_t states_, groups_, codes_;
  // For the points of states, made positive: their squares, with the bits that identify
  // predecessors, and the factors of numbers in the cost.
  const Array<int32_t> squares_, factors_;
  // These are integers, stored as floats since table lookups take floats.
  const Array<float> best_[2];
  const Array<uint8_t> found_;
  const Array<int32_t> numbers_;
  const Array<uint16_t> path_;
};

}  // namespace

int64_t trellis_tasks(const TrellisEncoding& e) {
  return divided_up(e.rows * tiles_of_row(e), kTiles);
}

bool encode_trellis(const TrellisEncoding& e, int64_t task) {
  Search search(e);
  if (search.failed()) return false;
  const int64_t tiles = e.rows * tiles_of_row(e);
  for (int64_t i = task * kTiles; i < smaller(tiles, (task + 1) * kTiles); ++i)
    search.encode(i);
  return true;
}

}  // namespace eqquant
