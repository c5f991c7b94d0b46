// The scales of blocks, in their stored dtypes.
#pragma once
#include "lane.cuh"

struct Float32 {
  static constexpr bool applied = true;
  using Stored = Word;
  ON_LANE static float number(Stored bits) { return of_bits(bits); }
};

struct BFloat16 {
  static constexpr bool applied = true;
  using Stored = unsigned short;
  ON_LANE static float number(Stored bits) { return of_bits(Word(bits) << 16); }
};

struct Float16 {
  static constexpr bool applied = true;
  using Stored = unsigned short;
  ON_LANE static float number(Stored bits) { return of_half(bits); }
};

// No scales: scales of whole rows are applied afterwards.
struct None {
  static constexpr bool applied = false;
  using Stored = Word;
  ON_LANE static float number(Stored) { return 1; }
};

// The offset that blocks have besides scales of a class `Scales`.
enum class Offset { kNone, kZeroPoint, kMinimum };

template <class Scales, Offset offset>
struct Offsets {
  using Stored = typename Scales::Stored;  // of minima
};
template <class Scales>
struct Offsets<Scales, Offset::kZeroPoint> {
  using Stored = unsigned char;
};
