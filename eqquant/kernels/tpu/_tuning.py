import math
from typing import NamedTuple

from .._problem import Problem


# Sizes of tiles, by the bundles that libtpu schedules for v5e and v6e: those of
# `tests/aot/tpu_bundles.csv`. One table for both: when a kernel is traced for export,
# or for a mesh that is elsewhere, nobody knows the generation; and what is best for
# one is within a few percent for the other.

# How many numbers of a weight are decoded for one step of the grid: more, if that is
# what eight blocks have.
tile_n = 512
tile_k = 2048
# How many rows a tile of inputs has, at most. The weight is decoded once for each tile
# of them. Of 1024 rows, NF4 takes 17 % more bundles than codes that need no lookup: for
# 4096 rows, no more than it would take to decode it once, write that, and read it.
tile_m = 1024
# How much of the 128 MiB of memory on the chip a kernel may have, in bytes.
memory = 64 * 2**20
# How long a block may be.
largest_block = 1024
# Up to how many rows in the matrix unit the scales come after the product. More of them
# keep it busy for so long that the weight itself is scaled meanwhile.
few_rows = 128
# How many contracted numbers go into the matrix unit at a time, at least. It has 128
# rows on v5e, and 256 on v6e; but where a row of inputs stands there once for each of
# several blocks, fewer blocks are better on both.
depth_of_blocks = 128
depth_of_tiles = 256


class Tile(NamedTuple):
    """What one step of the grid takes of a weight: `n` rows, `k` contracted numbers of
    each, and the latter `span` at a time."""

    n: int
    k: int
    span: int


def tile(problem: Problem, planes: int, depth: int) -> Tile:
    """The size of a tile whose bytes are decoded into so many planes."""
    block = problem.format.block_size
    # A register has 32 rows of bytes, and 8 of scales.
    unit = math.lcm(depth, 32 * planes)
    if block is None:
        span = least = unit
    else:
        span = math.lcm(block, unit)
        least = math.lcm(8 * block, span)
    k = min(max(tile_k // least, 1), -(-problem.k // least)) * least
    return Tile(min(tile_n, -(-problem.n // 128) * 128), k, span)


def tile_of_rows(m: int, least: int) -> int:
    """How many rows of inputs a tile has, of which registers have `least`."""
    tiles = -(-m // tile_m)
    return -(-m // (tiles * least)) * least
