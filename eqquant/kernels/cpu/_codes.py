import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ...formats import AbstractFormat, AbstractGrid, as_product, FP4, FP8, per_byte
from .._problem import Problem


# These kernels are for grids. Codes lie with the contracted axis first, `j n`, several
# to a byte; scales and offsets are `g n`.


def grid(problem: Problem) -> AbstractGrid:
    """Returns the format, after a check that it is a grid."""
    assert isinstance(problem.format, AbstractGrid)
    return problem.format


def radix(format: AbstractGrid) -> int:
    """Returns the base in which the codes of a byte are digits."""
    assert format.radix is not None
    return format.radix


def per(format: AbstractGrid) -> int:
    """Returns the number of codes in a byte."""
    return per_byte(radix(format))


def scales(stored: dict[str, Array], problem: Problem) -> Float[Array, "g n"]:
    """Returns the scale of each block of each row."""
    scale = grid(problem).scales(stored, problem.tail)
    return jnp.broadcast_to(scale, (scale.shape[0], problem.n))


def codes_of(
    packed: Integer[Array, "j n"], radix: int, p: int
) -> Integer[Array, "_ n"]:
    """Returns the codes of some bytes, one in each row: the first `p` digits of each
    byte base `radix`, the least significant digit first.

    (This is one expression for all digits of a byte, so that XLA compiles it once.)
    """
    if p == 1:
        return packed
    j, n = packed.shape
    of_digit = lambda a: jnp.asarray(a)[None, :, None]
    if radix & (radix - 1) == 0:
        # Digits base a power of two are groups of bits.
        bits = radix.bit_length() - 1
        shift = np.arange(0, bits * p, bits, dtype=np.uint8)
        codes = (packed[:, None] >> of_digit(shift)) & np.uint8(radix - 1)
    else:
        # Two divisions, as products and shifts: by `radix**i`, to get the leading
        # digits, and by `radix`, to take off all of them but the last.
        every = np.array([as_product(radix**i) for i in range(p)], np.uint16)
        wide = _divided(packed.astype(jnp.uint16)[:, None], *map(of_digit, every.T))
        one = np.array([as_product(radix)], np.uint16)
        less = _divided(wide, *map(of_digit, one.T)) * np.uint16(radix)
        codes = (wide - less).astype(jnp.uint8)
    return codes.reshape(j * p, n)


def _divided(x, factor, more, shift):
    return (x * factor + more) >> shift


def to_bytes(x: Shaped[Array, "m k"], p: int, j: int) -> Shaped[Array, "m j p"]:
    """Groups inputs by the byte of the weight that multiplies them, `p` to a byte."""
    m, k = x.shape
    return jnp.pad(x, ((0, 0), (0, j * p - k))).reshape(m, j, p)


def points(
    format: AbstractGrid, codes: Integer[Array, "*s"]
) -> tuple[Float[Array, "*s"], float]:
    """Returns the point of each code, up to a factor, and the factor: by
    `format.to_points`, or by a method that is faster on a CPU."""
    if isinstance(format, FP8):
        # Shifts these codes into float16 and corrects the exponent. (XLA converts other
        # types one element after another, and looks up in tables likewise.)
        high = lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.int8)
        high = high.astype(jnp.int16) << np.int16(8)
        if format.dtype == jnp.float8_e5m2:
            return _from_half(high), 1.0
        half = (high >> np.int16(1)) & np.int16(~0x4000)
        nan = half & np.int16(0x3F80) == np.int16(0x3F80)
        return _from_half(jnp.where(nan, np.int16(0x7E00), half)), 2.0**8
    if isinstance(format, FP4):
        high = codes.astype(jnp.int16) << np.int16(12)
        half = (high >> np.int16(3)) & np.int16(~0x7000)
        return _from_half(half), 2.0**14
    return format.to_points(codes), 1.0


def _from_half(bits):
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


@ft.cache
def point_table(format: AbstractGrid) -> Float[np.ndarray, " r"]:
    """Returns the point of each code, for a format with several codes to a byte."""
    codes = np.arange(radix(format), dtype=np.uint8)
    return compute_now(lambda: format.to_points(jnp.asarray(codes)))


def compute_now(fn: Callable[[], Array]) -> np.ndarray:
    """Computes the result of a function, also while a program is being traced."""
    # Concretely, even during the trace of a function under `shard_map`.
    here = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), here:
        return np.asarray(fn())


@ft.cache
def integer_step(format: AbstractFormat, most: int = 127) -> tuple[int, int] | None:
    """Returns the integers `a` and `b` such that each code `c` stands for the point
    `a c + b`, if all points are integers of at most `most` in magnitude. `None` if
    there are no such integers."""
    if not isinstance(format, AbstractGrid):
        return None
    if format.code_dtype == np.int8:
        codes = np.arange(-127, 128, dtype=np.int8)
    else:
        codes = np.arange(format.levels, dtype=np.uint8)
    found = compute_now(lambda: format.to_points(jnp.asarray(codes)))
    a = found[1] - found[0]
    b = found[0] - a * codes[0]
    whole = a == np.round(a) and b == np.round(b) and np.max(np.abs(found)) <= most
    if not whole or not np.array_equal(found, a * codes + b):
        return None
    return int(a), int(b)


def refuse_grid(problem: Problem) -> str | None:
    """Returns why no kernel for grids on a CPU can compute a product, or `None`."""
    format = grid(problem)
    if format.radix is None:
        return f"needs bytes that hold whole codes, got {format}"
    if format.ordered:
        return f"needs blocks of consecutive positions, got {format}"
    if format.offset == "minimum":
        return f"is for formats without minima, got {format}"
    return refuse_layout(problem)


# Kernels that sweep over the codes unroll rows.
_most_rows = 2


def refuse_rows(problem: Problem) -> str | None:
    """Returns why no kernel that sweeps over the codes applies, or `None`."""
    if problem.rows is not None and problem.rows <= _most_rows:
        return None
    got = "an unknown number" if problem.rows is None else problem.rows
    return f"is for at most {_most_rows} rows, got {got}"


def refuse_layout(problem: Problem) -> str | None:
    """Returns why no kernel for CPUs applies, or `None`."""
    if problem.empty:
        return "needs non-empty operands"
    if problem.row_axis != -1:
        return "needs the contracted axis first in memory, where `tree_prepack` puts it"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    return None
