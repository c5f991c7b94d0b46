import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Shaped

from ..formats import AbstractFormat, AbstractGrid, digits, from_bits, Int4, per_byte
from ._problem import Problem


# The formats whose kernels are here: those on a grid, and `Int4`. Their codes lie with
# the contracted axis first, `j n`, several to a byte; their scales `g n`.
Grid = AbstractGrid | Int4


def grid(problem: Problem) -> Grid:
    """The format, which is one of those."""
    assert isinstance(problem.format, Grid)
    return problem.format


def radix(format: Grid) -> int:
    return 16 if isinstance(format, Int4) else format.radix


def per(format: Grid) -> int:
    """How many codes a byte has."""
    return per_byte(radix(format))


def scales(stored: dict[str, Array], problem: Problem) -> Float[Array, "g n"]:
    """The scale of each block of each row."""
    scale = from_bits(stored["scale"], grid(problem).scale_dtype)
    return jnp.broadcast_to(scale, (scale.shape[0], problem.n))


def zero_points(stored: dict[str, Array]) -> Float[Array, "g n"] | None:
    """The zero-point of each block of each row, if there are any."""
    if "zero_point" in stored:
        return stored["zero_point"].astype(jnp.float32)
    return None


def points(codes: Integer[Array, "*s"], format: Grid) -> list[Float[Array, "*s"]]:
    """What the first code of each byte stands for, the second and so on; less the
    scale, and the zero-point if there is one."""
    found = digits(codes, radix(format))
    if isinstance(format, Int4):
        less = np.float32(8 if format.symmetric else 0)
        return [code.astype(jnp.float32) - less for code in found]
    return [format.to_points(code) for code in found]


def to_bytes(x: Shaped[Array, "m k"], p: int, j: int) -> Shaped[Array, "m j p"]:
    """Inputs by the bytes of the weight that they meet, of `p` codes each."""
    m, k = x.shape
    return jnp.pad(x, ((0, 0), (0, j * p - k))).reshape(m, j, p)


@ft.cache
def point_table(format: Grid) -> Float[np.ndarray, " r"]:
    """What each code stands for, as `points` says, of a format that packs them."""
    codes = np.arange(radix(format), dtype=np.uint8)
    return _now(lambda: points(jnp.asarray(codes), format)[0])


def _now(fn):
    # Within a `shard_map`, too.
    here = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), here:
        return np.asarray(fn())


@ft.cache
def integer_step(format: AbstractFormat) -> tuple[int, int] | None:
    """The integers `a` and `b` such that each code `c` stands for `a c + b`, which are
    at most 127. `None` if there are none."""
    if not isinstance(format, AbstractGrid):
        return None
    few = jax.ShapeDtypeStruct((1, 16), jnp.float32)
    dtype = jax.eval_shape(format.encode, few)["codes"].dtype
    if dtype == jnp.int8:
        codes = np.arange(-127, 128, dtype=np.int8)
    else:
        codes = np.arange(format.levels, dtype=np.uint8)
    found = _now(lambda: format.to_points(jnp.asarray(codes)))
    a = found[1] - found[0]
    b = found[0] - a * codes[0]
    whole = a == np.round(a) and b == np.round(b) and np.max(np.abs(found)) <= 127
    if not whole or not np.array_equal(found, a * codes + b):
        return None
    return int(a), int(b)


def refuse_layout(problem: Problem) -> str | None:
    """The reasons that all kernels for CPUs have."""
    if problem.n == 0 or problem.k == 0 or problem.rows == 0:
        return "is for operands that are not empty"
    if problem.row_axis != -1:
        return "needs a weight that lies with the contracted axis first"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    return None
