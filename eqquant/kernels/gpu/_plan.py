import dataclasses
from collections.abc import Sequence

import numpy as np


# Of an H200, which an H100 is much like.
_processors = 132
_shared_memory = 220 * 1024

# How many rows of the weight a warpgroup computes with: what `wgmma` takes.
group = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut into pieces.

    - `rows`: of `x`, in a piece.
    - `groups`: how many warpgroups compute a piece, each with `group` rows of the
      weight.
    - `bytes`: of each row of the weight, in a step of the pipeline.
    - `steps`: of the pipeline.
    - `stages`: how many steps are in memory at once.
    - `splits`: into how many parts the contracted axis is cut, each of `steps` steps.
    """

    rows: int
    groups: int
    bytes: int
    steps: int
    stages: int
    splits: int

    @property
    def channels(self) -> int:
        """Rows of the weight, in a piece."""
        return self.groups * group


def plan(
    m: int,
    n: int,
    j: int,
    p: int,
    itemsize: int,
    block: int | None,
    of_blocks: Sequence[int],
) -> Plan:
    """**Arguments:**

    - `m`: rows of `x`.
    - `n`, `j`: rows of the weight, and bytes of each.
    - `p`: codes of a byte.
    - `itemsize`: bytes of each number of the product.
    - `block`: codes that have a scale, `None` if that is not looked up at each step.
    - `of_blocks`: bytes of each array that is.
    """
    rows = next((r for r in (8, 16, 32, 64) if m <= r), 128)
    # Few rows are bound by how much of the weight is on its way, and by how many
    # warps decode it; the sums of many leave no registers for that.
    groups = 4 if rows <= 16 else 2
    most = min(256, 2**14 // rows)
    if block is not None:
        most = min(most, block * min(4 // len(of_blocks), 256 // rows))
    size = next(size for size in (128, 64, 32, 16) if p * size <= most)
    all_steps = -(-j // size)
    tiles = -(-n // (group * groups)) * -(-m // rows)
    steps = -(-all_steps // splits_of(tiles, all_steps, 8 * rows / size))
    splits = -(-all_steps // steps)
    scales = sum(loaded(p * size, block, nbytes) * nbytes for nbytes in of_blocks)
    stage = group * groups * (size + scales) + 2 * rows * p * size
    sums = group * groups * rows * (itemsize if splits == 1 else 4)
    return Plan(rows, groups, size, steps, stages_of(steps, stage, sums), splits)


def loaded(step: int, block: int | None, nbytes: int) -> int:
    """How many blocks come with each step of so many codes, if each has `nbytes`: those
    of the step, and 16 bytes at least."""
    return max(1 if block is None else step // block, 16 // nbytes)


def splits_of(tiles: int, steps: int, sums: float) -> int:
    """Into how many parts to cut the contracted axis of a product, of which there are
    `tiles` pieces of `steps` steps each.

    Counted is what the busiest multiprocessor moves, in steps: its parts of the weight;
    two more until the first has come; and `sums`, of each part, written and read.
    """
    splits = np.arange(1, min(8, steps) + 1)
    waves = -(-tiles * splits // _processors)
    cost = waves * (-(-steps // splits) + 2 + np.where(splits > 1, sums, 0))
    return int(splits[np.argmin(cost)])


def stages_of(steps: int, stage: int, sums: int) -> int:
    """How many steps of `stage` bytes fit in memory, next to `sums` bytes."""
    return max(1, min(8, steps, (_shared_memory - sums) // stage))


def aligned(n: int) -> int:
    """How long to make a row of `n` numbers, so that it takes a multiple of 16 bytes:
    the unit that fetches and stores memory needs that."""
    return -(-n // 8) * 8
