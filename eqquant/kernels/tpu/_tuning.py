import math
from collections.abc import Callable
from typing import NamedTuple

from .._problem import Problem


# Sizes of tiles, chosen by the number of instruction bundles that libtpu schedules for
# v5e and v6e (`tests/aot/tpu_bundles.csv`). Both have the same sizes: when a kernel is
# traced for export, or for a remote mesh, the generation is unknown; and the best size
# for one is within a few percent of the best for the other.

# The part of the weight that a step of the grid decodes. (`tile_k` grows if eight
# blocks are longer.)
tile_n = 512
tile_k = 2048
# The most rows of a tile of inputs. The weight is decoded once for each tile of inputs.
# With 1024 rows, NF4 takes 17 % more bundles than codes that need no lookup. For 4096
# rows this costs no more than decoding once, writing the result and reading it back.
tile_m = 1024
# The bytes of VMEM that a kernel may use, out of 128 MiB.
memory = 64 * 2**20
# The longest block.
largest_block = 1024
# With up to this many rows in the matrix unit, scales are applied after the product.
# More rows keep the matrix unit busy for so long that the weight can be scaled in the
# meantime.
few_rows = 128
# The least number of contracted numbers that go into the matrix unit at a time. It is
# 128 deep on v5e, and 256 on v6e; but where rows of inputs are repeated for each block,
# fewer blocks are better on both.
depth_of_blocks = 128
depth_of_tiles = 256


class Tile(NamedTuple):
    """The part of a weight that a step of the grid loads: `n` rows, and `k` contracted
    numbers of each, which are decoded `span` at a time."""

    n: int
    k: int
    span: int


def tile(problem: Problem, planes: int, depth: int) -> Tile:
    """Returns the size of a tile whose bytes are decoded to this many planes."""
    block = problem.format.block_size
    # A register holds 32 rows of bytes, or 8 of scales; tiles are whole registers.
    unit = math.lcm(depth, 32 * planes)
    if block is None:
        span = least = unit
    else:
        span = math.lcm(block, unit)
        least = math.lcm(8 * block, span)
    k = min(max(tile_k // least, 1), -(-problem.k // least)) * least
    return Tile(min(tile_n, -(-problem.n // 128) * 128), k, span)


def tile_of_rows(m: int, least: int) -> int:
    """Returns the number of rows of a tile of inputs, a multiple of the `least` rows
    that a register holds."""
    tiles = -(-m // tile_m)
    return -(-m // (tiles * least)) * least


def bundles(number: float | int) -> Callable[[Problem], float]:
    """Returns the predicted time of a kernel in which a tile of 2048x512 numbers of the
    weight takes about `number` bundles of instructions, each a cycle of a v6e. (The
    times were not measured: only the order of the kernels counts.)"""
    return lambda problem: problem.numbers * number / (2048 * 512) / 1.75e9
