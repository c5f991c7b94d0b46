// How GGUF's types pack codes and scales, as data. `weight/packings.inc` has it, of
// the fields of `eqquant/formats/gguf`. (Those of types with a codebook are read by
// `weight/codebooks.h`.) For each type:
//
// - `kBytes`: the size of a block, which is cut to `kSlices` slices of `kCodes` codes.
//   A byte has codes of one slice, but for their upper bits.
// - `kBlock`: the number of codes that share a scale: a small block.
// - `kBits`: the number of bits of a code.
// - `kPoints`: the number of points in the codebook, if there is one.
// - `kUnit`: what scales are to be multiplied by.
// - `kScale`, `kLow`: the first bytes of the scale and the minimum, or of those of the
//   small blocks' scales and minima. -1 if there is none.
// - `kZero`: what is subtracted from the small blocks' scales, `kScales`.
// - `kTimes`: how often the loop runs that reads the codes of a slice. It reads bytes
//   `kRead`, takes `kCode` out of them, and then codes that are `kEvery` further.
#pragma once

namespace eqquant {
namespace gguf {

// Byte `first` of a block, `slice` bytes further in each next slice, and `code` bytes
// further each time that the loop runs.
struct Byte {
  int first, slice, code;
};

// Some bits of a code: `number` bits of byte `of` of those, from bit `start` on, and
// `slice` bits higher in each next slice. In the code they begin with bit `at`.
struct CodeBits {
  int of, start, slice, number, at;
};

// Some bits of the scale of a small block: of byte `first`, and `next` bytes further
// for each next one. None if their number is 0.
struct ScaleBits {
  int first, next, start, number, at;
};

// The scales of the small blocks `first`, `first + every` and so on, `number` of them,
// and their minima.
struct Scales {
  int first, number, every;
  ScaleBits steps[2], lows[2];
};

}  // namespace gguf
}  // namespace eqquant

#include "weight/packings.inc"
