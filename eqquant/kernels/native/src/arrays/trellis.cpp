// The algorithm of Viterbi, tile by tile, for as many states at once as a vector has
// numbers. All is done as in `formats/_viterbi.py`: see there what a key is, and why
// they fit into 32 bits. Backwards, since a state has the bits of the codes after it
// above its own.
#include "arrays/trellis.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "isa/basics.h"

namespace eqquant {
namespace {

using V = EQQUANT_SET;
using Ints = V::Ints;

constexpr int64_t kLanes = V::width;
// So many tiles share the memory that is allocated for a task.
constexpr int64_t kTiles = 8;
// The numbers before and after a seam that are looked at to choose its state.
constexpr int64_t kAround = 48;
constexpr int32_t kMostNumber = 600, kMostPoint = 510;
constexpr int32_t kNoSeam = -1;
// A table is loaded from any group on.
constexpr int64_t kMore = 8;

// Memory for some numbers, aligned to 64 bytes.
template <class T>
class Array {
 public:
  explicit Array(int64_t number)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(number) * sizeof(T),
                                             std::align_val_t(64), std::nothrow))) {}
  ~Array() { ::operator delete(data_, std::align_val_t(64)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  bool failed() const { return data_ == nullptr; }
  T& operator[](int64_t i) const { return data_[i]; }
  T* get() const { return data_; }

 private:
  T* const data_;
};

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
        keys_{Array<int32_t>(states_), Array<int32_t>(states_)},
        best_(groups_ + kMore),
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
    for (int64_t g = 0; g < groups_ + kMore; ++g) best_[g] = 0;
  }

  bool failed() const {
    return squares_.failed() || factors_.failed() || keys_[0].failed() ||
           keys_[1].failed() || best_.failed() || found_.failed() ||
           numbers_.failed() || path_.failed();
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
    write(size, e_.words + (row * e_.size + at) * e_.bits / 32);
  }

 private:
  // Of the bits that costs are shifted by, those that points are: so that their
  // products with numbers are of 16 bits each.
  int above() const { return std::min(e_.bits, 5); }

  // The best path for the first `size` of the numbers.
  void search(int64_t size, int32_t seam) {
    begin(seam);
    int32_t lowest = 0;
    for (int64_t t = 1; t < size; ++t) {
      const int32_t* const keys = keys_[(t - 1) % 2].get();
      int32_t* const next = keys_[t % 2].get();
      uint8_t* const found = found_.get() + t * groups_;
      if (groups_ < kLanes) {
        few_groups(numbers_[t], keys, found, next);
        continue;
      }
      lowest = choose(numbers_[t], lowest, keys, found);
      switch (e_.bits) {
        case 1: reach<1>(numbers_[t], next); break;
        case 2: reach<2>(numbers_[t], next); break;
        default: reach<3>(numbers_[t], next);
      }
    }
    trace(size, seam);
  }

  void trace(int64_t size, int32_t seam) {
    const int32_t* const keys = keys_[(size - 1) % 2].get();
    int64_t state = seam == kNoSeam ? 0 : seam;
    for (int64_t s = state; s < states_; s += seam == kNoSeam ? 1 : groups_)
      if (keys[s] < keys[state]) state = s;
    for (int64_t t = size - 1; t >= 0; --t) {
      path_[t] = static_cast<uint16_t>(state);
      const int64_t group = state >> e_.bits;
      if (t > 0) state = group | int64_t{found_[t * groups_ + group]} * groups_;
    }
  }

  // The square of the difference, as a part of a key.
  int32_t cost(int32_t x, int64_t state) const {
    return ((x * x) << e_.bits) + squares_[state] -
           factors_[state] * (2 * x * (1 << (e_.bits - above())));
  }

  void begin(int32_t seam) {
    const auto steps = static_cast<int32_t>(divided_up(e_.states, e_.bits));
    const int32_t most = kMostNumber + kMostPoint;
    const int32_t never = (steps * most * most) << e_.bits;
    for (int64_t s = 0; s < states_; ++s) {
      const bool allowed = seam == kNoSeam || s >> e_.bits == seam;
      keys_[0][s] = cost(numbers_[0], s) + (allowed ? 0 : never);
    }
  }

  // A step, where there are fewer groups than numbers in a vector.
  void few_groups(int32_t x, const int32_t* keys, uint8_t* found, int32_t* next) {
    int32_t best[kLanes], lowest = INT32_MAX;
    for (int64_t g = 0; g < groups_; ++g) {
      best[g] = keys[g];
      for (int64_t s = g; s < states_; s += groups_) best[g] = std::min(best[g], keys[s]);
      found[g] = static_cast<uint8_t>(best[g] & (codes_ - 1));
      best[g] -= found[g];
      lowest = std::min(lowest, best[g]);
    }
    for (int64_t s = 0; s < states_; ++s)
      next[s] = best[s >> e_.bits] - lowest + cost(x, s);
  }

  // The first half of a step: the best predecessor of the states of each group, and its
  // cost, less the lowest one of the step before. Returns the lowest.
  int32_t choose(int32_t x, int32_t before, const int32_t* keys, uint8_t* found) {
    const int32_t square = (x * x) << e_.bits;
    const Ints less = V::ints(before), more = V::ints(square);
    const auto mask = static_cast<int32_t>(codes_ - 1);
    Ints lowest = V::ints(INT32_MAX);
    for (int64_t g = 0; g < groups_; g += kLanes) {
      Ints best = V::load(keys + g);
      for (int64_t s = g + groups_; s < states_; s += groups_)
        best = V::min(best, V::load(keys + s));
      const Ints code = V::both(best, mask);
      V::store_low_bytes(found + g, code);
      best = V::minus(V::minus(best, code), less);
      lowest = V::min(lowest, best);
      V::store(best_.get() + g, V::as_floats(V::add(best, more)));
    }
    alignas(64) int32_t each[kLanes];
    V::store(each, lowest);
    return *std::min_element(each, each + kLanes);
  }

  // The other half: the keys of all states. `bits` is at most 3.
  template <int bits>
  void reach(int32_t x, int32_t* next) {
    const int32_t number = -2 * x * (1 << (e_.bits - above()));
    alignas(64) int32_t each[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) each[i] = static_cast<int32_t>(i >> bits);
    const Ints order = V::load(each);
    for (int64_t s = 0; s < states_; s += kLanes) {
      const float* const from = best_.get() + (s >> (bits < 3 ? bits : e_.bits));
      Ints best;
      if constexpr (kLanes >> bits > 1)
        best = V::as_ints(typename V::Table8(from)[order]);
      else
        best = V::as_ints(V::all(*from));
      const Ints product = V::times(V::load(factors_.get() + s), number);
      const Ints square = V::add(V::load(squares_.get() + s), product);
      V::store(next + s, V::add(square, best));
    }
  }

  void write(int64_t size, uint32_t* words) const {
    std::memset(words, 0, static_cast<size_t>(size * e_.bits / 8));
    for (int64_t i = 0; i < size; ++i) {
      const uint64_t code = path_[size - 1 - i] & (codes_ - 1);
      const int64_t word = i * e_.bits / 32, bit = i * e_.bits % 32;
      words[word] |= static_cast<uint32_t>(code << bit);
      if (bit + e_.bits > 32) words[word + 1] |= static_cast<uint32_t>(code >> (32 - bit));
    }
  }

  const TrellisEncoding& e_;
  const int64_t states_, groups_, codes_;
  // Of the points of states, which are made positive: their squares, with the bits that
  // tell predecessors apart; and what numbers are multiplied with.
  const Array<int32_t> squares_, factors_;
  const Array<int32_t> keys_[2];
  // (The bits of integers, for lookups.)
  const Array<float> best_;
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
