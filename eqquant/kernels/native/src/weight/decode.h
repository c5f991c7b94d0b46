// Decodes a vector of bytes to the points of their digits: one vector of floats for
// each digit.
#pragma once

#include <cstdint>

#include "weight/weight.h"

namespace eqquant {
namespace {

template <class V, Packing packing>
class Decode {
 public:
  static constexpr int64_t per = codes_per_byte(packing);

  explicit Decode(const Blocks& w) : table_(entries(w).of) {}

  void operator()(typename V::Ints c, typename V::Floats* point) const {
    if constexpr (packing == Packing::kBits8) {
      point[0] = V::to_floats(c);
    } else if constexpr (packing == Packing::kTrits) {
      EQQUANT_UNROLL
      for (int i = 0; i < per; ++i) {
        auto rest = V::template right<9>(V::times(c, 171));  // c / 3
        point[i] = table_[V::minus(c, V::times(rest, 3))];
        c = rest;
      }
    } else {
      EQQUANT_UNROLL
      for (int i = 0; i < per; ++i) {
        point[i] = table_[c];
        c = V::template right<8 / per>(c);
      }
    }
  }

 private:
  struct Entries {
    float of[16];
  };

  // The points, repeated to 16 entries: the lookup uses the low 4 bits of an index, so
  // bits above the digit have no effect.
  static Entries entries(const Blocks& w) {
    constexpr int base = packing == Packing::kBits1   ? 2
                         : packing == Packing::kBits2 ? 4
                                                      : 16;
    Entries found;
    for (int i = 0; i < 16; ++i)
      found.of[i] = packing == Packing::kBits8 ? 0 : w.points[i % base];
    return found;
  }

  typename V::Table16 table_;
};

}  // namespace
}  // namespace eqquant
