import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PyTree

from .._progress import Watched
from .._trace import check_batches


class Favourites(eqx.Module):
    """The probabilities that a model gives to the next token, at each place.

    - `logs`: their logarithms, of the most probable tokens, or of all.
    - `tokens`: which tokens these are, the most probable first. `None` if all are kept.
    """

    logs: Float[Array | np.ndarray, "*b t n"]
    tokens: Integer[Array | np.ndarray, "*b t n"] | None

    @property
    def first(self) -> Integer[Array, "*b t"]:
        """The favourites."""
        if self.tokens is None:
            return jnp.argmax(self.logs, axis=-1)
        return jnp.asarray(self.tokens)[..., 0]

    def divergence(self, logs: Float[Array, "*b t v"]) -> Float[Array, "*b t"]:
        """The Kullback-Leibler divergence of others, given the logarithms of all their
        probabilities. Where not all are kept here, the rest counts as one token."""
        mine = jnp.asarray(self.logs)
        if self.tokens is not None:
            its = jnp.take_along_axis(logs, jnp.asarray(self.tokens), axis=-1)
            mine, logs = (
                jnp.concatenate([a, _log_of_rest(a)], axis=-1) for a in (mine, its)
            )
        gain = jnp.where(mine > -jnp.inf, jnp.exp(mine) * (mine - logs), 0)
        return jnp.sum(gain, axis=-1)


def _log_of_rest(logs):
    # (Rounded, the others may take all. A small rest is then as good as none.)
    rest = 1 - jnp.sum(jnp.exp(logs), axis=-1, keepdims=True)
    return jnp.log(jnp.maximum(rest, 1e-7))


class Kept(NamedTuple):
    """What a model predicted of one batch, whose loss `of_next` is for each token but
    the first."""

    text: Integer[np.ndarray, "*b t"]
    favourites: Favourites
    of_next: Float[np.ndarray, "*b s"]


@dataclasses.dataclass(frozen=True, repr=False)
class Predictions:
    """What a language model predicts of a text, kept to compare others with. See
    [`eqquant.predictions`][].

    - `kept`: what it predicted, by batch.
    """

    kept: list[Kept]

    @property
    def nbytes(self) -> int:
        """How much memory they take, in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.kept))

    def __repr__(self) -> str:
        tokens = sum(kept.text.size for kept in self.kept)
        return f"Predictions(of {tokens:,} tokens, {self.nbytes / 1e6:.3g} MB)"


def predictions(
    fn: Callable[[Any, Any], Any],
    model: PyTree,
    batches: Iterable[Any],
    *,
    top: int | None = None,
) -> Predictions:
    """Keeps what a language model predicts of a text, so that
    [`eqquant.evaluate`][] can compare any number of others with it, without running it
    again.

    !!! Example

        ```python
        fn = lambda model, tokens: jax.vmap(model)(tokens)
        dense = eqquant.predictions(fn, model, batches)
        for format in ("int8", "nf4", "int4"):
            q = eqquant.tree_quantize(model, format)
            print(eqquant.evaluate(fn, q, batches, dense=dense))
        ```

    **Arguments:**

    - `fn`, `batches`: as those of [`eqquant.evaluate`][].
    - `model`: the model, which is not needed any more afterwards.
    - `top`: how many of the most probable tokens to keep at each place: 8 bytes for
        each. By default all, 4 bytes for each. Divergences from the rest are then those
        of one token in its place, which are smaller.

    **Returns:**

    An [`eqquant.Predictions`][], in the memory of the host.

    **Raises:**

    A `ValueError` as [`eqquant.evaluate`][], and if `top` is not positive.
    """
    if top is not None and top < 1:
        raise ValueError(f"`top` should be positive, or `None`. Got {top}.")
    check_batches(batches)
    predict = eqx.filter_jit(predicted)
    kept = []
    for text, _ in texts(Watched(batches, "Predicting")):
        *found, size = predict(fn, model, text, top)
        check_vocabulary(text, size)
        kept.append(Kept(text, *jax.tree.map(np.asarray, found)))
    return Predictions(kept)


def predicted(
    fn: Callable[[Any, Any], Any],
    model: PyTree,
    text: Integer[Array | np.ndarray, "*b t"],
    top: int | None,
) -> tuple[Favourites, Float[Array, "*b s"], int]:
    """What a model predicts, the loss of each token but the first, and the size of the
    vocabulary."""
    logs = log_probabilities(fn, model, text)
    if top is None or top >= logs.shape[-1]:
        favourites = Favourites(logs, None)
    else:
        favourites = Favourites(*jax.lax.top_k(logs, top))
    return favourites, loss_of_next(logs, text), logs.shape[-1]


def check_vocabulary(text: Integer[np.ndarray, "*b t"], size: int) -> None:
    """**Raises:**

    A `ValueError` if a token is not in a vocabulary of a size.
    """
    if text.size and not 0 <= text.min() <= text.max() < size:
        raise ValueError(
            f"`batches` should have tokens from 0 to {size - 1}, of which `fn` gives "
            f"logits. Got tokens from {text.min()} to {text.max()}."
        )


def texts(
    batches: Iterable[Any],
) -> Iterator[tuple[Integer[np.ndarray, "*b t"], Bool[np.ndarray, "*b t"]]]:
    """The tokens of each batch, and which of them count.

    **Raises:**

    A `ValueError` if they are not integers, or if a mask is of another shape.
    """
    for batch in batches:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        text, mask = batch if pair else (batch, None)
        array = np.asarray(text) if eqx.is_array(text) else None
        if array is None or array.ndim == 0 or array.dtype.kind not in "iu":
            got = type(text).__name__ if array is None else array.dtype
            raise ValueError(
                "`batches` should be arrays of integers, or pairs of one and a mask. "
                f"Got {got}{list(np.shape(text))}."
            )
        text = array
        counts = np.ones(text.shape, bool) if mask is None else np.asarray(mask)
        if counts.shape != text.shape or counts.dtype != bool:
            raise ValueError(
                f"`mask` should be booleans of the shape {text.shape} of `tokens`. "
                f"Got {counts.dtype.name}{list(counts.shape)}."
            )
        yield text, counts


def log_probabilities(
    fn: Callable[[Any, Any], Any], model: PyTree, text: Integer[Any, "*b t"]
) -> Float[Array, "*b t v"]:
    """The logarithms of the probabilities that a model gives to each token.

    **Raises:**

    A `ValueError` if `fn` does not give logits for each token.
    """
    logits = fn(model, text)
    shape = getattr(logits, "shape", None)
    if shape is None or shape[:-1] != text.shape or len(shape) == 0:
        got = type(logits).__name__ if shape is None else f"the shape {shape}"
        raise ValueError(
            f"`fn` should give logits of the shape {(*text.shape, '...')} for tokens "
            f"of the shape {text.shape}. Got {got}."
        )
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def loss_of_next(
    logs: Float[Array, "*b t v"], text: Integer[Any, "*b t"]
) -> Float[Array, "*b s"]:
    """The loss of each token but the first."""
    at = jnp.asarray(text)[..., 1:, None].astype(jnp.int32)
    found = jnp.take_along_axis(logs[..., :-1, :], at, axis=-1, mode="clip")
    return -found[..., 0]
