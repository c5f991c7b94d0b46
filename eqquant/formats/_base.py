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


# What a format stores: integer arrays by name, possibly nested. All that is static
# lives on the format.
Stored: TypeAlias = dict[str, Any]


@ft.lru_cache(maxsize=4096)
def _structs(format, shape):
    structs = jax.eval_shape(format.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    # (Without the mesh that is set now.)
    return jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), structs)


class AbstractFormat(eqx.Module):
    """How the numbers of an array are stored. A format is a value: it holds no arrays,
    every field is static, and formats with equal fields are equal.

    A format sees an array with its contracted axis last, `*b n k`, and writes arrays of
    integers whose axes are `*b n _`. A stored array that all rows share may have size
    one in place of `n`; the leading axes `*b` are always there. So whatever stacks,
    maps or slices `*b` can do the same to each stored array.

    Most formats are a grid of numbers and a scale for each block. Those need not say
    all this: see [`eqquant.AbstractGrid`][].
    """

    @property
    @abc.abstractmethod
    def block_size(self) -> int | None:
        """How many numbers share a scale. `None` for the whole contracted axis."""

    @property
    @abc.abstractmethod
    def bits(self) -> float:
        """How many bits a code takes."""

    @property
    def row_axis(self) -> int:
        """How the stored arrays of a matrix should lie in memory, for the sake of
        products: -2 as `encode` writes them, and -1 with the last two axes swapped, the
        contracted one first."""
        return -2

    @property
    def splits(self) -> bool:
        """Whether a part of the contracted axis, of whole blocks, can be stored alone
        as it is stored among others."""
        return True

    @property
    def tile(self) -> int:
        """A part of the contracted axis can be stored alone only if it is of a multiple
        of so many numbers, as well as of whole blocks."""
        return 1

    @property
    def takes_integers(self) -> bool:
        """Whether arrays of integers are stored as if they were floats. Otherwise they
        are an error."""
        return False

    def prepacked(self, platform: Literal["cpu", "tpu", "gpu"]) -> "AbstractFormat":
        """What the kernels for a platform would rather read: the same format, but that
        it may pack the same codes otherwise."""
        return self

    @abc.abstractmethod
    def encode(
        self, w: Float[Array, "*b k"], scale: Float[Array, "*b g"] | None = None
    ) -> Stored:
        """Numbers to stored arrays.

        **Arguments:**

        - `w`: the numbers, in any floating-point dtype. Blocks lie along the last axis.
        - `scale`: one scale for each block. Computed from `w` if it is not given.

        **Returns:**

        A dictionary of integer arrays. (Weight decay, a cast or a moving average would
        change a floating-point array, so scales are stored as their bits.)
        """

    def structs(self, shape: tuple[int, ...]) -> Stored:
        """The shapes and dtypes of the stored arrays of numbers of a shape."""
        return jtu.tree_map(lambda a: a, _structs(self, tuple(shape)))

    @abc.abstractmethod
    def decode(self, stored: Stored, tail: int) -> Float[Array, "*b k"]:
        """Stored arrays back to numbers, in float32.

        **Arguments:**

        - `stored`: as returned by `encode`.
        - `tail`: the number of positions that the last byte has room for but `w` did
            not have.
        """

    @abc.abstractmethod
    def shape(self, stored: Stored, tail: int) -> tuple[int, ...]:
        """The shape `*b k` of the numbers, from the stored arrays alone."""

    def with_rows_scaled(
        self, stored: Stored, factors: Float[Array, "*b n 1"]
    ) -> Stored | None:
        """What is stored of a matrix whose rows are multiplied by positive factors,
        with the same codes. `None` if the scales of the format are not those of single
        rows, or not floats."""
        del stored, factors
        return None

    def __check_init__(self):
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
    """The shortest arguments that make a format. Defaults are left out. Numbers and
    formats have no name while all fields before them are written."""
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
    """A format of a few integers, which come back as they were. `encode` is given no
    other numbers: [`eqquant.quantize`][] sees to that. It may be given them as integers
    or as booleans, too.

    - `domain`: the numbers that can be stored, in ascending order.
    - `dtype`: what arrays of integers and of booleans decode to.
    """

    domain: eqx.AbstractClassVar[tuple[int, ...]]
    dtype: eqx.AbstractVar[Any]

    def is_outside(self, w: Shaped[Array, "*s"]) -> Bool[Array, "*s"]:
        """Which of some numbers cannot be stored. NaN is one of those."""
        if w.dtype == bool:
            w = w.astype(jnp.uint8)
        outside = jnp.ones(w.shape, bool)
        for number in self.domain:
            if number >= 0 or not jnp.issubdtype(w.dtype, jnp.unsignedinteger):
                outside &= w != jnp.asarray(number, w.dtype)
        return outside

    @property
    def domain_text(self) -> str:
        """As in a sentence: `"-1, 0 and 1"`."""
        *some, last = map(str, self.domain)
        return f"{', '.join(some)} and {last}"


class AbstractScaled(AbstractFormat):
    """A format with a scale for each block, which is a float. It is stored as the bits
    of that, under the name `"scale"`."""

    @property
    @abc.abstractmethod
    def scale_dtype(self) -> Any:
        """The dtype of the scales: float32, bfloat16 or float16."""

    @abc.abstractmethod
    def scales(self, stored: Stored, tail: int) -> Float[Array, "*b g"]:
        """The scales, in float32."""


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
    from what is stored. Its kernels are those of `base`, which are given `flat`.

    - `by_element`: whether `flat` computes each number from those at its place alone,
      so that it may be given arrays whose axes are swapped.
    """

    by_element: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def base(self) -> AbstractScaled:
        """The format whose codes these are."""

    @abc.abstractmethod
    def flat(self, stored: Stored, tail: int) -> Stored:
        """The arrays that `base` would have stored for the same numbers, with the same
        `tail`."""

    def byte_scales(self, stored: Stored) -> ByteScales | None:
        """How `stored["scale"]` holds the scales of `base`, if each of them is one byte
        and `stored["codes"]` is what `base` would have stored. Otherwise `None`.
        Kernels that read such scales run on what is stored, without `flat`."""
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
