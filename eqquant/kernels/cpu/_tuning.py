import jax

from ...formats import AbstractFormat, Binary, Int8


# Thresholds between kernels, as timed with the clock of `eqquant bench` on two cores
# with AVX512, for weights of 4096x11008, 4096x4096 and 768x3072.

# Whether XLA keeps a fusion that reads many parts of an array whole. Before JAX 0.11 it
# splits it into many.
fuses = jax.__version_info__ >= (0, 11)

# The least number of elements of a weight for which rounding the inputs pays, and the
# least number of rows for which products of bfloat16 do.
rounding_size = 2**18
bfloat16_rows = 32

# The least size of blocks whose composite scales fit in the memory that a product may
# take, if XLA copies them all, as it does before JAX 0.11.
composite_block = 64

# Before JAX 0.11, XLA computes products of bfloat16 in float32 on a CPU.
multiplies_bfloat16 = jax.__version_info__ >= (0, 11)

# Before, XLA takes as long for products of 8-bit integers as for those of floats.
multiplies_integers = jax.__version_info__ >= (0, 11)


def sweep_rows(format: AbstractFormat) -> int:
    """The largest number of rows for which a sweep over the weight is the fastest."""
    return 0 if isinstance(format, Int8) and not fuses else 2


# The same for a sweep over units.
unit_sweep_rows = 2


# Thresholds of the native library.

# The least number of rows for which products of bfloat16 are the fastest: by codes as
# they are, and by decoded numbers.
native_bfloat16_rows = 16
native_decoded_bfloat16_rows = 8

# The least number of rows for which products of 8-bit integers alone are the fastest
# with AVX2: of given integers, and of inputs that are rounded first.
native_byte_rows = 32
native_rounded_byte_rows = 64

# The least block for which products of 8-bit integers are as fast.
native_integer_block = 64

# The same with AMX, for this many rows or more.
native_tile_block = 256
native_tile_rows = 64


def native_decodes_first(radix: int, rows: int, integers: bool) -> bool:
    """Whether it is faster to decode a part of the weight for all rows of inputs than
    to decode it for a few of them at a time.

    **Arguments:**

    - `radix`: the base whose digits the codes of a byte are.
    - `rows`: how many rows of inputs there are.
    - `integers`: whether the processor multiplies 8-bit integers, for many rows.
    """
    if integers:
        return radix == 256 and rows in range(2, 8)
    most = {2: 7, 3: 1, 4: 1, 16: 3, 256: 0}  # (With AVX2 alone.)
    return rows > most.get(radix, rows)


def native_integer_rows(format: AbstractFormat, tiles: bool) -> int | None:
    """The least number of rows for which rounding the inputs pays, on processors with
    or without AMX's `tiles`. `None` if it never does."""
    # With tiles this is not timed but counted: the two digits of 8 rows fill a tile,
    # and a tile takes as many cycles as two rows take without.
    if tiles:
        return 8
    if isinstance(format, Binary):
        return None
    return 8 if isinstance(format, Int8) else 17


def native_decoded_integer_rows(radix: int | None) -> int:
    """The least number of rows for which products of 16-bit integers are faster than
    those of floats, on processors that have them but no tiles.

    **Arguments:**

    - `radix`: the base whose digits the codes of a byte are, or `None` if `native` does
        not know how they are packed.
    """
    return {None: 4, 2: 128, 3: 12}.get(radix, 5)


# The largest number of rows for which splitting inputs into three 8-bit digits is the
# fastest, and the least block of codes of 4 bits, unless rows are in panels.
native_split_rows = 4
native_split_block = 64

# The largest number of rows for which products read panels on processors with tiles.
native_panel_rows_with_tiles = 7


# The largest number of columns of a product across the blocks for which rounding its
# inputs, as XLA's tiles do, takes longer than multiplying them, as in attention.
native_narrow_columns = 256


def native_transposed_rows(narrow: bool, integers: bool, highest: bool) -> int:
    """The largest number of rows for which a product across the blocks by the native
    library is faster than tiles by XLA.

    **Arguments:**

    - `narrow`: whether it has at most `native_narrow_columns`, the codes have 4 or 8
        bits, and the processor has AVX512.
    - `integers`: whether the format has points that are integers, and one scale for
        each channel, so that XLA's tiles may multiply integers.
    - `highest`: whether XLA's tiles may not round.
    """
    return 64 if highest or narrow else 4 if integers else 31
