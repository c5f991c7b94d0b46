import abc
import functools as ft
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import (
    AbstractAdjustable,
    AbstractFormat,
    AbstractGrid,
    AbstractTiled,
    Layout,
    Parameters,
    Rotated,
    Stored,
    unrotated,
)
from ..kernels import encoder, tile_encoder
from ._gram import normalised
from ._rounding import Rounding
from ._tiles import NearestTile, Tiles


class AbstractMethod(eqx.Module):
    """A method rounds numbers to values that a format can store. It holds no arrays:
    every field is static.

    A subclass chooses the codes of a matrix and the scales and offsets of its blocks.
    The base class handles stacks of matrices, formats that round the scales of several
    blocks together, and the comparison with rounding to nearest.

    - `needs_gram`: whether the method requires a Gram matrix.
    - `takes_tiles`: whether the method implements `choose_tiles`, for formats that
        choose the numbers of a tile together.
    """

    needs_gram: eqx.AbstractClassVar[bool]
    takes_tiles: ClassVar[bool] = False

    @abc.abstractmethod
    def choose(
        self,
        w: Float[Array, "n k"],
        format: AbstractAdjustable,
        gram: Float[Array, " k *_"] | None,
        rows: Float[Array, ""] | None,
        parameters: Parameters | None,
    ) -> tuple[Integer[Array, "n g s"], Parameters]:
        """Returns the codes of a matrix, and the parameters of its blocks, each
        `_ g 1`.

        **Arguments:**

        - `gram`: the Gram matrix of the inputs of the matrix, or its diagonal. `None`
            if it is not known.
        - `rows`: the number of rows that `gram` is summed over.
        - `parameters`: if given, the parameters to choose codes for.
        """

    def choose_tiles(
        self,
        w: Float[Array, "n k"],
        format: AbstractTiled,
        nearest_tile: NearestTile,
        gram: Float[Array, " k *_"] | None,
        rows: Float[Array, ""] | None,
    ) -> Tiles:
        """Rounds like `choose`, to a format that chooses the numbers of a tile
        together.

        **Arguments:**

        - `nearest_tile`: a function of the format and the arguments of its method
            `nearest_tile`, with the same result.
        """
        raise TypeError(f"{self} takes no tiles.")

    @abc.abstractmethod
    def losses(
        self, error: Float[Array, "n k"], gram: Float[Array, " k *_"] | None
    ) -> Float[Array, " n"]:
        """Returns the error of each row, in the measure that the method minimises."""

    def applies(self, format: AbstractFormat) -> bool:
        """Whether the method can round to a format."""
        format = unrotated(format)
        if isinstance(format, AbstractTiled):
            return self.takes_tiles
        adjustable = isinstance(format, AbstractAdjustable)
        return adjustable and isinstance(format.grid, AbstractGrid)

    def check(self, format: AbstractFormat) -> None:
        """Raises a `ValueError` if the method does not apply to a format."""
        if not self.applies(format):
            raise ValueError(
                f"`method` {self} chooses the scales of blocks. It has none to choose "
                f"in {format}: pass `method=None` for that format."
            )

    def solve(
        self,
        w: Float[Array, "*b n k"],
        format: AbstractFormat,
        gram: Float[Array, "..."] | None = None,
        rows: Float[Array, "*_"] | None = None,
        *,
        natively: bool = False,
    ) -> Stored:
        """Encodes matrices by this method.

        **Arguments:**

        - `w`: the numbers, in any floating-point dtype.
        - `format`: a format.
        - `gram`: for each matrix of `w`, the sum of `x^T x` over rows `x` of inputs,
            `*#b k k`, or its diagonal, `*#b k`. Any positive multiple will do.
        - `rows`: the number of rows that these sums are over, `*#b`. Sums over fewer
            than `k` rows count less.
        - `natively`: whether the computation runs on a CPU of this machine, so that the
            native library may choose the codes of formats that are slow to encode.

        **Returns:**

        The stored arrays, as `format.encode` writes them. No row has a larger error, in
        the measure of `losses`, than by rounding to nearest.

        **Raises:**

        A `ValueError` if the method does not apply to the format, or if shapes do not
        match.
        """
        self.check(format)
        if self.needs_gram and gram is None:
            raise ValueError(
                f"`method` {self} needs the Gram matrix of what a weight is multiplied "
                "with, `gram`. Got none. `ScaleSearch()` does without."
            )
        _check_shapes(w, gram, rows)
        if isinstance(format, Rotated):
            # The stored matrix is the rotated one, which multiplies rotated inputs.
            if gram is not None:
                gram = format.rotate_gram(gram, gram.ndim - w.ndim + 2)
            w = format.rotate(w)
            return self.solve(w, format.format, gram, rows, natively=natively)
        return _solve(self, format, natively, w, gram, rows)


def squared_losses(
    error: Float[Array, "n k"], gram: Float[Array, " k *_"] | None
) -> Float[Array, " n"]:
    """Returns `e H e^T` for each row `e`, or its sum of squares without a Gram."""
    if gram is None:
        return jnp.sum(error**2, -1)
    weighed = error @ gram if gram.ndim == 2 else error * gram[None]
    return jnp.sum(weighed * error, -1)


@ft.partial(jax.jit, static_argnums=(0, 1, 2))
def _solve(method, format, natively, w, gram, rows):
    *lead, n, k = w.shape
    if w.size == 0:
        return format.encode(w)
    number = math.prod(lead)
    # One matrix after another. A shared Gram is indexed, not copied.
    flat = lambda a, ndim: a.reshape(-1, *a.shape[a.ndim - ndim :])
    places = lambda a, ndim: _places(a.shape[: a.ndim - ndim], lead)
    inner = None if gram is None else gram.ndim - len(lead)

    def solve(i):
        w_i = flat(w, 2)[i].astype(jnp.float32)
        gram_i = rows_i = None
        if gram is not None and inner is not None:
            gram_i = flat(gram, inner)[jnp.asarray(places(gram, inner))[i]]
        if rows is not None:
            rows_i = rows.ravel()[jnp.asarray(places(rows, 0))[i]]
        return _one(method, format, natively, w_i, gram_i, rows_i)

    with jax.default_matmul_precision("highest"):
        if number == 1:
            stored = jtu.tree_map(lambda a: a[None], solve(0))
        else:
            stored = lax.map(solve, jnp.arange(number))
    return jtu.tree_map(lambda a: a.reshape(*lead, *a.shape[1:]), stored)


def _one(method, format, natively, w, gram, rows):
    n, k = w.shape
    if isinstance(format, AbstractTiled):
        found, numbers = _in_tiles(method, format, natively, w, gram, rows)
    else:
        found, numbers = _in_blocks(method, format, w, gram, rows)
    plain = _nearest(format, natively, w)
    nearest = Layout(format).trimmed(plain, k).decode(plain)
    gram = None if gram is None else normalised(gram)
    losses = lambda numbers: method.losses(w - numbers, gram)
    # The comparison is false for NaNs, so rows with these stay rounded to nearest.
    new, old = losses(numbers), losses(nearest)
    better = (new <= old)[:, None]
    pairs = zip(jtu.tree_leaves(found), jtu.tree_leaves(plain), strict=True)
    for a, b in pairs:
        if b.shape[-2] != n:  # All rows share this array.
            same, all_better = jnp.all(a == b), jnp.sum(new) <= jnp.sum(old)
            better = jnp.where(same, better, all_better)

    def chosen(a, b):
        return jnp.where(better if b.shape[-2] == n else better[:1], a, b)

    return jtu.tree_map(chosen, found, plain)


def _in_blocks(method, format, w, gram, rows):
    """Returns the stored arrays, and the numbers that they decode to."""
    n, k = w.shape
    unit = format.unit(w)
    x, common = (w, {}) if unit is None else (w / unit[0], unit[1])
    codes, parameters = method.choose(x, format, gram, rows, None)
    settled, parameters = format.settled(_of_rows(parameters))
    given = jtu.tree_map(lambda a: a[..., None], parameters)
    if format.joint:
        codes, _ = method.choose(x, format, gram, rows, given)
    # Numbers follow from the unpacked codes, since a program that both packs and
    # unpacks bits takes XLA long to compile.
    numbers = Rounding(format).numbers(codes, given)
    codes, numbers = (a.reshape(n, -1)[:, :k] for a in (codes, numbers))
    numbers = numbers if unit is None else numbers * unit[0]
    return format.write(codes, settled | common), numbers


def _in_tiles(method, format, natively, w, gram, rows):
    """Does the same for a format that chooses the numbers of a tile together."""
    native = tile_encoder(format) if natively else None
    nearest_tile = native or (lambda format, *args: format.nearest_tile(*args))
    codes, numbers, scale = method.choose_tiles(w, format, nearest_tile, gram, rows)
    return format.write(codes, scale), numbers


def _nearest(format, natively, w):
    tiled = isinstance(format, AbstractTiled)
    native = encoder(format, w.dtype, across=False) if tiled and natively else None
    return format.encode(w) if native is None else native(format, w)


def _of_rows(parameters):
    return jtu.tree_map(lambda a: a[..., 0], parameters)


def _places(shape, lead):
    # The flat index into `shape` for each matrix of `lead`, by broadcasting.
    number = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    return np.broadcast_to(number, lead).ravel()


def _check_shapes(w, gram, rows):
    if w.ndim < 2:
        raise ValueError(f"`w` should have axes `*b n k`. Got shape {w.shape}.")
    *lead, _, k = w.shape
    fits = lambda shape: all(a in (1, b) for a, b in zip(shape, lead, strict=True))
    if gram is not None:
        wide = gram.ndim == w.ndim and gram.shape[-2:] == (k, k)
        thin = gram.ndim == w.ndim - 1 and gram.shape[-1] == k
        inner = 2 if wide else 1
        if not (wide or thin) or not fits(gram.shape[: gram.ndim - inner]):
            raise ValueError(
                f"`gram` should have shape {(*lead, k, k)}, or {(*lead, k)} for its "
                "diagonal, where leading axes may have size one. Got "
                f"{gram.shape}."
            )
    if rows is not None and (rows.ndim != len(lead) or not fits(rows.shape)):
        raise ValueError(
            f"`rows` should have shape {tuple(lead)}, where axes may have size one. "
            f"Got {rows.shape}."
        )
