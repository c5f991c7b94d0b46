from typing import NamedTuple


# The rows of `x` that tensor cores multiply at once, and those of the weight.
group, tile = 8, 16
# The most warps of a block.
_warps = 8
# How many blocks there should be, if the contracted axis is long enough: some for each
# of about a hundred multiprocessors.
_blocks = 256
# The bytes of each of its two rows that a lane has under way. A GPU's memory keeps pace
# with about 30 kB for each multiprocessor, of 500 lanes.
_ahead = 32


class Plan(NamedTuple):
    """How a product is computed: see `src/product.cuh`.

    - `nbytes`: of a row, that a lane loads at once: 4, 8 or 16.
    - `warps`: of a block.
    - `ahead`: the number of steps in a group of steps, which are loaded together.
    - `steps`: along the contracted axis.
    - `splits`: the number of parts of the contracted axis that different blocks have.
    - `columns`: of `x`, those of whole groups of steps.
    """

    nbytes: int
    warps: int
    ahead: int
    steps: int
    splits: int
    columns: int


def bytes_of_lane(block: int | None, bits: int) -> int | None:
    """How many bytes of a row a lane loads at once, such that those of four lanes are
    of one block of the weight. `None` if there is no such number."""
    for nbytes in (16, 8, 4):
        # (A lane loads 16 bytes of inputs at once, too: eight of them.)
        codes = 8 * nbytes // bits
        if codes >= 8 and (block is None or block % (4 * codes) == 0):
            return nbytes
    return None


def plan(n: int, j: int, block: int | None, bits: int, stack: int) -> Plan:
    """Chooses a plan for a weight of `n` rows of `j` bytes, with `stack` such products
    side by side."""
    nbytes = bytes_of_lane(block, bits)
    assert nbytes is not None
    steps, ahead = -(-j // (4 * nbytes)), _ahead // nbytes
    groups_of_steps = -(-steps // ahead)
    warps = next(w for w in (8, 4, 2, 1) if w <= min(_warps, max(1, groups_of_steps)))
    splits, blocks = 1, -(-n // tile) * stack
    # (Each warp should have some steps, or else it starts for nothing.)
    while blocks * splits < _blocks and 4 * splits * warps <= groups_of_steps:
        splits *= 2
    columns = groups_of_steps * ahead * 4 * nbytes * 8 // bits
    return Plan(nbytes, warps, ahead, steps, splits, columns)
