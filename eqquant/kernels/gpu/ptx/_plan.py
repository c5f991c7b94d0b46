from typing import NamedTuple

from ._kind import Kind


# The number of rows of `x`, and of rows of the weight, that tensor cores multiply at
# once.
group, tile = 8, 16
# The largest number of warps in a block.
_warps = 8
# The number of blocks to reach if the contracted axis is long enough: some for each of
# about a hundred multiprocessors.
_blocks = 256
# The bytes of each row that the four lanes of the row have in flight. About 30 kB on
# each multiprocessor, which runs 500 lanes, keep a GPU's memory busy.
_ahead = 128


class Plan(NamedTuple):
    """How a product is computed: see `src/product.cuh`.

    - `warps`: the number of warps in a block.
    - `ahead`: the number of steps in a group of steps, which are loaded together.
    - `steps`: the number of steps along the contracted axis.
    - `splits`: the number of parts of the contracted axis, which are computed by
      different blocks.
    - `columns`: the number of columns of `x`, padded to whole groups of steps.
    """

    warps: int
    ahead: int
    steps: int
    splits: int
    columns: int


def plan(n: int, j: int, kind: Kind, stack: int) -> Plan:
    """Chooses a plan for a weight of `n` rows of `j` bytes, and `stack` such products
    that run side by side."""
    steps = -(-j // kind.step_bytes)
    ahead = next(d for d in (8, 4, 2, 1) if d == 1 or d * kind.step_bytes <= _ahead)
    groups_of_steps = -(-steps // ahead)
    warps = next(w for w in (8, 4, 2, 1) if w <= min(_warps, max(1, groups_of_steps)))
    splits, blocks = 1, -(-n // tile) * stack
    # (Each warp should have at least two groups of steps, to be worth starting.)
    while blocks * splits < _blocks and 4 * splits * warps <= groups_of_steps:
        splits *= 2
    columns = groups_of_steps * ahead * kind.step_columns
    return Plan(warps, ahead, steps, splits, columns)
