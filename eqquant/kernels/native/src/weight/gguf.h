// The packing of codes and scales in GGUF types, as data. `weight/packings.inc` lists
// it, from the fields of `eqquant/formats/gguf`. (`weight/codebooks.h` reads the codes
// of types with a codebook.) For each type:
//
// - `kBytes`: the size of a block, which is cut into `kSlices` slices of `kCodes`
//     codes. A byte has codes of one slice, except for upper bits.
// - `kBlock`: the number of codes that share a scale: a small block.
// - `kBits`: the number of bits of a code.
// - `kPoints`: the number of points in the codebook, if there is one.
// - `kUnit`: the factor of scales.
// - `kScale`, `kLow`: the first bytes of the scale and the minimum, or of the scales of
//     the small blocks' scales and minima. -1 if there is none.
// - `kZero`: the number that is subtracted from the small blocks' scales, `kScales`.
// - `kTimes`: the number of iterations of the loop that reads the codes of a slice. It
//     reads bytes `kRead`, extracts `kCode` from them, and then continues `kEvery`
//     codes further.
//   `kRead`, takes `kCode` out of them, and then codes that are `kEvery` further.
#pragma once

namespace eqquant {
namespace gguf {

// Byte `first` of a block, `slice` bytes further in each next slice, and `code` bytes
// further each time that the loop runs.
struct Byte {
  int first, slice, code;
};

// Some bits of a code: `number` bits of byte `of` of the bytes read, from bit `start`
// on, and `slice` bits higher in each next slice. In the code they begin with bit `at`.
struct CodeBits {
  int of, start, slice, number, at;
};

// Some bits of the scale of a small block: in byte `first`, and `next` bytes further
// for each next block. None if their number is 0.
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
