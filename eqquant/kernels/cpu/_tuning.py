import jax

from ...formats import AbstractFormat, Binary, Int8


# Which product is the fastest: as timed with the clock of `eqquant bench`, on two cores
# with AVX512, of weights of 4096x11008, 4096x4096 and 768x3072.

# Before JAX 0.11, XLA breaks a fusion that reads many parts of an array into many.
fuses = jax.__version_info__ >= (0, 11)

# From what size of the weight on products of rounded inputs pay, and from how many rows
# on those of bfloat16.
rounding_size = 2**18
bfloat16_rows = 32

# Before JAX 0.11, XLA computes products of bfloat16 in float32 on a CPU.
multiplies_bfloat16 = jax.__version_info__ >= (0, 11)


def sweep_rows(format: AbstractFormat) -> int:
    """Up to how many rows a sweep over the bytes of a weight is the fastest."""
    return 0 if isinstance(format, Int8) and not fuses else 2


# The same of the native library.

# From how many rows on products of bfloat16 are the fastest.
native_bfloat16_rows = 16


def native_integer_rows(format: AbstractFormat, tiles: bool) -> int | None:
    """From how many rows on rounded inputs pay. `None` if they never do."""
    # Not timed: two digits of 8 rows fill a tile, which takes as many cycles as two
    # rows take without.
    if tiles:
        return 8
    if isinstance(format, Binary):
        return None
    return 8 if isinstance(format, Int8) else 17


def native_transposed_rows(integers: bool, highest: bool) -> int:
    """Up to how many rows a product across the blocks is faster than those of tiles by
    XLA: of integers with a scale for each channel, or others; exact ones, or rounded.
    """
    return 64 if highest else 4 if integers else 31
