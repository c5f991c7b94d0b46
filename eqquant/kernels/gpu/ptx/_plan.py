from typing import NamedTuple


# The number of rows of `x`, and of rows of the weight, that tensor cores multiply at
# once.
group, tile = 8, 16
# The largest number of warps in a block.
_warps = 8
# The number of blocks to reach if the contracted axis is long enough: some for each of
# about a hundred multiprocessors.
_blocks = 256
# The bytes of each of its two rows that a lane has in flight. About 30 kB on each
# multiprocessor, which runs 500 lanes, keep a GPU's memory busy.
_ahead = 32


class Plan(NamedTuple):
    """How a product is computed: see `src/product.cuh`.

    - `nbytes`: the number of bytes of a row that a lane loads at once: 4, 8 or 16.
    - `warps`: the number of warps in a block.
    - `ahead`: the number of steps in a group of steps, which are loaded together.
    - `steps`: the number of steps along the contracted axis.
    - `splits`: the number of parts of the contracted axis, which are computed by
      different blocks.
    - `columns`: the number of columns of `x`, padded to whole groups of steps.
    """

    nbytes: int
    warps: int
    ahead: int
    steps: int
    splits: int
    columns: int


def bytes_of_lane(block: int | None, bits: int) -> int | None:
    """Returns how many bytes of a row a lane loads at once. The bytes of four lanes
    belong to the same block of the weight. Returns `None` if no number of bytes allows
    this."""
    for nbytes in (16, 8, 4):
        # (A lane also loads 16 bytes of inputs at once, which are eight inputs.)
        codes = 8 * nbytes // bits
        if codes >= 8 and (block is None or block % (4 * codes) == 0):
            return nbytes
    return None


def plan(n: int, j: int, block: int | None, bits: int, stack: int) -> Plan:
    """Chooses a plan for a weight of `n` rows of `j` bytes, and `stack` such products
    that run side by side."""
    nbytes = bytes_of_lane(block, bits)
    assert nbytes is not None
    steps, ahead = -(-j // (4 * nbytes)), _ahead // nbytes
    groups_of_steps = -(-steps // ahead)
    warps = next(w for w in (8, 4, 2, 1) if w <= min(_warps, max(1, groups_of_steps)))
    splits, blocks = 1, -(-n // tile) * stack
    # (Each warp should have at least two groups of steps, to be worth starting.)
    while blocks * splits < _blocks and 4 * splits * warps <= groups_of_steps:
        splits *= 2
    columns = groups_of_steps * ahead * 4 * nbytes * 8 // bits
    return Plan(nbytes, warps, ahead, steps, splits, columns)
