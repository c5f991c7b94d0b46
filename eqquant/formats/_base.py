import abc
import dataclasses
import functools as ft
import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Bool, Float, Shaped

from ._check import check_boolean


# The stored arrays of a format: integer arrays by name, possibly nested. All static
# data lives on the format.
Stored: TypeAlias = dict[str, Any]


@ft.lru_cache(maxsize=4096)
def _structs(format, shape):
    structs = jax.eval_shape(format.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    # (Drops the mesh that is currently set.)
    return jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), structs)


class AbstractFormat(eqx.Module):
    """Defines how the numbers of an array are stored. A format is a value: it holds no
    arrays, every field is static, and formats with equal fields are equal.

    A format sees an array with its contracted axis last, `*b n k`, and writes arrays of
    integers whose axes are `*b n _`. A stored array that all rows share may have size
    one in place of `n`; the leading axes `*b` are always there. So stacking, mapping or
    slicing `*b` does the same to each stored array.

    Most formats are a grid of numbers and a scale for each block, and need not define
    all of this: see [`eqquant.AbstractGrid`][].
    """

    @property
    @abc.abstractmethod
    def block_size(self) -> int | None:
        """How many numbers share a scale. `None` for the whole contracted axis."""

    @property
    @abc.abstractmethod
    def bits(self) -> float:
        """The number of bits of a code."""

    @property
    def row_axis(self) -> int:
        """The preferred order of the stored arrays of a matrix in memory: -2 as
        `encode` writes them, and -1 with the last two axes swapped, so that the
        contracted axis comes first."""
        return -2

    @property
    def splits(self) -> bool:
        """Whether whole blocks along the contracted axis are stored alone in the same
        way as among others."""
        return True

    @property
    def tile(self) -> int:
        """A part of the contracted axis can be stored alone only if its length is a
        multiple of this number, and of the block size."""
        return 1

    @property
    def rows_together(self) -> int:
        """How many rows are stored together: a matrix has a multiple of this number,
        and some of its rows can be stored alone only if they are such groups."""
        return 1

    @property
    def takes_integers(self) -> bool:
        """Whether arrays of integers are stored like floats. Otherwise they are an
        error."""
        return False

    def prepacked(self, platform: Literal["cpu", "tpu", "gpu"]) -> "AbstractFormat":
        """Returns the format that the kernels for a platform prefer to read: the same
        format, perhaps with another packing of the codes."""
        return self

    @abc.abstractmethod
    def encode(
        self, w: Float[Array, "*b k"], scale: Float[Array, "*b g"] | None = None
    ) -> Stored:
        """Converts numbers to stored arrays.

        **Arguments:**

        - `w`: the numbers, in any floating-point dtype. Blocks lie along the last axis.
        - `scale`: one scale for each block. Computed from `w` if it is not given.

        **Returns:**

        A dictionary of integer arrays. (Weight decay, a cast or a moving average would
        change floating-point arrays, so scales are stored as their bits.)
        """

    def structs(self, shape: tuple[int, ...]) -> Stored:
        """Returns the shapes and dtypes of the stored arrays for numbers of this
        shape."""
        return jtu.tree_map(lambda a: a, _structs(self, tuple(shape)))

    @abc.abstractmethod
    def decode(self, stored: Stored, tail: int) -> Float[Array, "*b k"]:
        """Converts stored arrays back to numbers, in float32.

        **Arguments:**

        - `stored`: as returned by `encode`.
        - `tail`: the number of positions in the last byte that `w` did not fill.
        """

    @abc.abstractmethod
    def shape(self, stored: Stored, tail: int) -> tuple[int, ...]:
        """Returns the shape `*b k` of the numbers, from the stored arrays alone."""

    def with_rows_scaled(
        self, stored: Stored, factors: Float[Array, "*b n 1"]
    ) -> Stored | None:
        """Returns the stored arrays of a matrix whose rows are multiplied by positive
        factors, with the same codes. Returns `None` if the format has no scale for each
        row, or its scales are not floats."""
        del stored, factors
        return None

    def __check_init__(self):
        for field in dataclasses.fields(self):
            if field.type is bool:
                check_boolean(field.name, getattr(self, field.name))
        size = self.block_size
        if size is None:
            return
        wanted = (
            "`block_size` should be None (one scale for the whole contracted axis) or "
            "a positive multiple of 16 below 2**31. Got "
        )
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{wanted}{size!r}, of type {type(size).__name__}.")
        if not 0 < size < 2**31 or size % 16 != 0:
            raise ValueError(f"{wanted}{size}.")

    def __pdoc__(self, **kwargs):
        del kwargs
        return wl.TextDoc(f"{type(self).__name__}({', '.join(_arguments(self))})")


def _arguments(format: AbstractFormat) -> Iterator[str]:
    """Returns the shortest arguments that make a format, without defaults. Numbers and
    formats are positional as long as all fields before them are written."""
    named = False
    for field in dataclasses.fields(format):
        value = getattr(format, field.name)
        if not field.init or _is_default(value, field):
            named = True
            continue
        plain = isinstance(value, int | float | AbstractFormat | None)
        named = named or field.kw_only or not plain or isinstance(value, bool)
        yield f"{field.name}={_text(value)}" if named else _text(value)


def _is_default(value: Any, field: dataclasses.Field) -> bool:
    if field.default is dataclasses.MISSING:
        return False
    converter = field.metadata.get("converter", lambda x: x)
    return value == converter(field.default)


def _text(value: Any) -> str:
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value.item() if isinstance(value, np.generic) else value)


class AbstractExact(AbstractFormat):
    """A format that stores a few integers exactly. `encode` gets no other numbers:
    [`eqquant.quantize`][] checks that. They may also be integers or booleans.

    - `domain`: the numbers that can be stored, in ascending order.
    - `dtype`: the dtype to which arrays of integers and of booleans decode.
    """

    domain: eqx.AbstractClassVar[tuple[int, ...]]
    dtype: eqx.AbstractVar[Any]

    def is_outside(self, w: Shaped[Array, "*s"]) -> Bool[Array, "*s"]:
        """Marks numbers that cannot be stored, such as NaN."""
        if w.dtype == bool:
            w = w.astype(jnp.uint8)
        outside = jnp.ones(w.shape, bool)
        for number in self.domain:
            if number >= 0 or not jnp.issubdtype(w.dtype, jnp.unsignedinteger):
                outside &= w != jnp.asarray(number, w.dtype)
        return outside

    @property
    def domain_text(self) -> str:
        """The domain as text for a sentence: `"-1, 0 and 1"`."""
        *some, last = map(str, self.domain)
        return f"{', '.join(some)} and {last}"


class AbstractScaled(AbstractFormat):
    """A format with a floating-point scale for each block. Its bits are stored under
    the name `"scale"`."""

    @property
    @abc.abstractmethod
    def scale_dtype(self) -> Any:
        """The dtype of the scales: float32, bfloat16 or float16."""

    @abc.abstractmethod
    def scales(self, stored: Stored, tail: int) -> Float[Array, "*b g"]:
        """Returns the scales, in float32."""


class ByteScales(NamedTuple):
    """Scales of one byte each.

    - `dtype`: `float8_e8m0fnu` or `float8_e4m3fn`.
    - `factor`: the name of the stored array that holds the bits of a float32 for each
      matrix, by which its scales (of `float8_e4m3fn`) are multiplied.
    - `inverse`: whether they are divided by it instead.
    """

    dtype: np.dtype
    factor: str | None = None
    inverse: bool = False


class AbstractComposite(AbstractScaled):
    """A format with the codes of a grid, `base`, whose scales and offsets are computed
    from the stored arrays. Its kernels are those of `base`, which get `flat`.

    - `by_element`: whether `flat` computes each number only from the numbers at its
        place, so that it also accepts arrays whose axes are swapped.
    """

    by_element: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def base(self) -> AbstractScaled:
        """The format of the codes."""

    @abc.abstractmethod
    def flat(self, stored: Stored, tail: int) -> Stored:
        """Returns the arrays that `base` would have stored for the same numbers, with
        the same `tail`."""

    def byte_scales(self, stored: Stored) -> ByteScales | None:
        """Returns how `stored["scale"]` holds the scales of `base`, if each of them is
        one byte and `stored["codes"]` equals the codes of `base`. Otherwise `None`.
        Kernels that read such scales get the stored arrays directly, without `flat`."""
        del stored
        return None

    @property
    def bits(self) -> float:
        return float(self.base.bits)

    @property
    def row_axis(self) -> int:
        return self.base.row_axis

    @property
    def scale_dtype(self) -> Any:
        return self.base.scale_dtype

    def decode(self, stored, tail):
        return self.base.decode(self.flat(stored, tail), tail)

    def scales(self, stored, tail):
        return self.base.scales(self.flat(stored, tail), tail)

    def shape(self, stored, tail):
        return self.base.shape(stored, tail)
