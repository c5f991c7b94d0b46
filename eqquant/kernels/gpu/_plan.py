import dataclasses
from collections.abc import Sequence

import numpy as np


# The number of multiprocessors of an H100 or H200, and the bytes of shared memory that
# a kernel may use on each.
_processors = 132
_shared_memory = 220 * 1024

# The number of rows of the operand that `wgmma` takes from one warpgroup.
group = 64

# The number of warpgroups that compute a tile. (With four, a kernel would never end: it
# is launched with 96 registers per thread, and the four would wait for more registers
# than there are. Three were slower than two on an H100.)
_groups = 2

# The registers per thread that are left to the warpgroup that copies tiles.
copying_registers = 56


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of the tiles and of the pipeline of a product.

    - `rows`: the rows of `x` in a tile.
    - `groups`: the number of warpgroups that compute a tile, each with `group` rows of
      the weight.
    - `bytes`: the bytes of each row of the weight in one step of the pipeline.
    - `steps`: the number of steps of the pipeline.
    - `stages`: the number of steps whose tiles are in shared memory at once.
    - `splits`: the number of parts of the contracted axis, of `steps` steps each. They
      are computed in parallel, and added afterwards.
    - `scales_numbers`: whether the scales of blocks are applied to decoded numbers, and
      not to sums.
    """

    rows: int
    groups: int
    bytes: int
    steps: int
    stages: int
    splits: int
    scales_numbers: bool = False

    @property
    def channels(self) -> int:
        """The rows of the weight in a tile."""
        return self.groups * group


def plan(
    m: int,
    n: int,
    j: int,
    p: int,
    itemsize: int,
    block: int | None,
    scaling: Sequence[int],
    minima: bool = False,
) -> Plan:
    """Chooses a plan.

    **Arguments:**

    - `m`: the number of rows of `x`.
    - `n`, `j`: the number of rows of the weight, and of bytes in each.
    - `p`: the number of codes per byte.
    - `itemsize`: the bytes of each number of the product.
    - `block`: the number of codes that share a scale; `None` if scales are applied to
        the sums instead of within the steps.
    - `scaling`: the itemsizes of the arrays of scales and zero-points that the steps
        load.
    - `minima`: whether blocks have minima.
    """
    # With few rows, the sums of each block fit in registers. With many, they would not.
    rows = next((r for r in (8, 16, 32, 64) if m <= r), 128)
    scales_numbers = block is not None and (minima or rows > 64)
    channels = -(-n // (_groups * group))
    if m > 128 and itemsize == 2 and channels * -(-m // 256) >= 0.7 * _processors:
        # Tiles of twice as many rows halve the work of decoding. This pays if there are
        # still enough tiles for the multiprocessors.
        rows = 256
    # The number of codes of a row in a step is limited by shared memory, which holds
    # two steps or more, and by the number of blocks.
    most = min(256, 2**14 // rows) if rows <= 128 else min(128, 64 * p)
    if block is not None:
        few = 4 if scales_numbers else min(4 // len(scaling), 256 // rows)
        most = min(most, block * few)
    size = next(size for size in (128, 64, 32, 16) if p * size <= most)
    all_steps = -(-j // size)
    tiles = channels * -(-m // rows)
    splits = splits_of(tiles, all_steps, 8 * rows / size) if rows <= 128 else 1
    steps = -(-all_steps // splits)
    splits = -(-all_steps // steps)
    scales = sum(loaded(p * size, block, nbytes) * nbytes for nbytes in scaling)
    stage = group * _groups * (size + scales) + 2 * rows * p * size
    sums = group * _groups * rows * (itemsize if splits == 1 else 4)
    stages = stages_of(steps, stage, sums)
    return Plan(rows, _groups, size, steps, stages, splits, scales_numbers)


def loaded(step: int, block: int | None, nbytes: int) -> int:
    """Returns the number of scales of `nbytes` bytes that are copied with a step of
    `step` codes: one for each of its blocks, and at least the 16 bytes that TMA
    copies."""
    return max(1 if block is None else step // block, 16 // nbytes)


def splits_of(tiles: int, steps: int, sums: float) -> int:
    """Returns the number of parts into which to split the contracted axis of a product
    that has `tiles` tiles of `steps` steps each.

    This minimizes the memory traffic of the busiest multiprocessor, in units of a step:
    its parts of the weight, two steps of latency for each part, and, if there are
    several parts, `sums` for writing and reading the partial sums of each.
    """
    splits = np.arange(1, min(8, steps) + 1)
    waves = -(-tiles * splits // _processors)
    cost = waves * (-(-steps // splits) + 2 + np.where(splits > 1, sums, 0))
    return int(splits[np.argmin(cost)])


def stages_of(steps: int, stage: int, sums: int) -> int:
    """Returns the number of steps of `stage` bytes that fit in shared memory next to
    `sums` bytes of output."""
    return max(1, min(8, steps, (_shared_memory - sums) // stage))


def width(n: int, tile: int) -> int:
    """Returns the length of the rows of a product of `n` columns that is stored in
    tiles of `tile` columns, padded to a multiple of 16 bytes as TMA requires.

    Rows are longer than a tile. Otherwise Mosaic would copy a tile as one contiguous
    run of memory, and overwrite what follows its rows.
    """
    return -(-max(n, tile + 1) // 8) * 8
