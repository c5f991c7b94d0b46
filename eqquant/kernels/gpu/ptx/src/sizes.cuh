#pragma once

// The sizes of a product.
// - `columns`: the number of columns of `x`, padded with zeros to whole groups of
//   steps.
// - `row_bytes`: the bytes of a row of the weight: of its codes, in a `Grid` a multiple
//   of the bytes that a lane reads at once, or of its blocks.
// - `steps`: the number of steps that have any codes.
// - `steps_of_block`: the number of steps that share a scale. (This and the next two are
//   for a `Grid`.)
// - `blocks`: the number of scales of a row.
// - `scales_of_row`: the distance from the scales of a row to the scales of the next
//   row. Zero if all rows share their scales.
// - `splits`: the number of parts of the contracted axis. Their sums are written side
//   by side.
struct Sizes {
  int rows, n, columns, row_bytes, steps, steps_of_block, blocks, scales_of_row, splits;
};
