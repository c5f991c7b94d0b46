// The points of codes.
#pragma once

#include <cstdint>

#include "weight/block_parts.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// Whether integers do not fit in 8 signed bits, once zero is subtracted.
inline bool is_wide(const Blocks& w) {
  return w.packing == Packing::kBits8 || w.offset == Offset::kZeroPoint;
}

// Whether codes index a table of at most 16 points.
constexpr bool has_few_points(Packing packing) { return bits_of(packing) <= 4; }
inline bool has_few_points(const Blocks& w) { return has_few_points(w.packing); }

// Whether there are weights of a packing with these points and offsets. No other
// templates are made.
template <Packing packing>
constexpr bool exists(PointType points, Offset offset) {
  if constexpr (is_gguf(packing)) {
    const auto mine = has_table(packing) ? PointType::kTable : PointType::kIntegers;
    auto own = Offset::kNone;
    if constexpr (codebook_points(packing) == 0)
      if (Parts<packing>::kLow >= 0) own = Offset::kMinimum;
    return points == mine && offset == own;
  }
  if (points > PointType::kTable && packing != Packing::kBits8) return false;
  return points == PointType::kIntegers || offset != Offset::kZeroPoint;
}

// Calls `f` with the offset as a compile-time constant.
template <class F>
void with_offset(Offset offset, F f) {
  switch (offset) {
    case Offset::kNone: return f(std::integral_constant<Offset, Offset::kNone>());
    case Offset::kZeroPoint:
      return f(std::integral_constant<Offset, Offset::kZeroPoint>());
    case Offset::kMinimum: return f(std::integral_constant<Offset, Offset::kMinimum>());
  }
}

// The points of the codes of the four vectors of a panel, in units of `kUnit`, before
// they are scaled. `less` is the `less` of the piece. `kBytes`: whether there are 8-bit
// codes.
template <class V>
struct IntegerPoints {
  static constexpr float kUnit = 1;
  static constexpr bool kBytes = true;
  static constexpr bool kWide = false;
  static constexpr bool kIntegers = true;
  explicit IntegerPoints(const Blocks&) {}
  void operator()(const uint8_t* c, const typename V::Floats*,
                  typename V::Floats* found) const {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      found[v] = V::to_floats(V::template bytes<true>(c + v * V::width));
  }
};
template <class V, bool sign>
struct WideIntegerPoints {
  static constexpr float kUnit = 1;
  static constexpr bool kBytes = !sign;
  static constexpr bool kWide = true;
  static constexpr bool kIntegers = true;
  explicit WideIntegerPoints(const Blocks&) {}
  void operator()(const uint8_t* c, const typename V::Floats* less,
                  typename V::Floats* found) const {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      found[v] =
          V::sub(V::to_floats(V::template bytes<sign>(c + v * V::width)), less[v]);
  }
};
template <class V, class Table>
struct TablePoints {
  static constexpr float kUnit = 1;
  static constexpr bool kBytes = std::is_same_v<Table, typename V::Table256>;
  static constexpr bool kWide = false;
  static constexpr bool kIntegers = false;
  Table table;
  explicit TablePoints(const Blocks& w) : table(w.points) {}
  void operator()(const uint8_t* c, const typename V::Floats*,
                  typename V::Floats* found) const {
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v)
      found[v] = table[V::template bytes<false>(c + v * V::width)];
  }
};
// 8-bit floats, by way of float16: see `V::small_floats`.
template <class V, PointType type>
struct SmallFloatPoints {
  static constexpr float kUnit = type == PointType::kE4M3 ? 256 : 1;
  static constexpr bool kBytes = true;
  static constexpr bool kWide = false;
  static constexpr bool kIntegers = false;
  explicit SmallFloatPoints(const Blocks&) {}
  void operator()(const uint8_t* c, const typename V::Floats*,
                  typename V::Floats* found) const {
    V::template small_floats<type>(c, found);
  }
};

template <class T>
struct Type {
  using type = T;
};

// Calls `f` with the class of the points of a weight.
template <class V, class F>
void with_points(const Blocks& w, F f) {
  switch (w.point_type) {
    case PointType::kIntegers:
      if (w.packing == Packing::kBits8) return f(Type<WideIntegerPoints<V, false>>());
      return is_wide(w) ? f(Type<WideIntegerPoints<V, true>>())
                        : f(Type<IntegerPoints<V>>());
    case PointType::kTable:
      return has_few_points(w)
                 ? f(Type<TablePoints<V, typename V::Table16>>())
                 : f(Type<TablePoints<V, typename V::Table256>>());
    case PointType::kE4M3: return f(Type<SmallFloatPoints<V, PointType::kE4M3>>());
    case PointType::kE5M2: return f(Type<SmallFloatPoints<V, PointType::kE5M2>>());
    case PointType::kSigned: return f(Type<IntegerPoints<V>>());
  }
}

}  // namespace
}  // namespace eqquant
