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
    """The probabilities that a model assigns to the next token, at each place.

    - `logs`: the log-probabilities of the most probable tokens, or of all tokens.
    - `tokens`: the numbers of these tokens, the most probable first. `None` if all are
        kept.
    """

    logs: Float[Array | np.ndarray, "*b t n"]
    tokens: Integer[Array | np.ndarray, "*b t n"] | None

    @property
    def first(self) -> Integer[Array, "*b t"]:
        """The most probable token at each place."""
        if self.tokens is None:
            return jnp.argmax(self.logs, axis=-1)
        return jnp.asarray(self.tokens)[..., 0]

    def divergence(self, logs: Float[Array, "*b t v"]) -> Float[Array, "*b t"]:
        """Returns the Kullback-Leibler divergence of another model, given all its
        log-probabilities. Tokens that are not kept count as a single token."""
        mine = jnp.asarray(self.logs)
        if self.tokens is not None:
            its = jnp.take_along_axis(logs, jnp.asarray(self.tokens), axis=-1)
            mine, logs = (
                jnp.concatenate([a, _log_of_rest(a)], axis=-1) for a in (mine, its)
            )
        gain = jnp.where(mine > -jnp.inf, jnp.exp(mine) * (mine - logs), 0)
        return jnp.sum(gain, axis=-1)


def _log_of_rest(logs):
    # The rounded probabilities of the kept tokens may sum to one or more, so the rest
    # is clipped to a small positive number.
    rest = 1 - jnp.sum(jnp.exp(logs), axis=-1, keepdims=True)
    return jnp.log(jnp.maximum(rest, 1e-7))


class Kept(NamedTuple):
    """The predictions of a model for one batch, and its loss `of_next` for each token
    but the first."""

    text: Integer[np.ndarray, "*b t"]
    favourites: Favourites
    of_next: Float[np.ndarray, "*b s"]


@dataclasses.dataclass(frozen=True, repr=False)
class Predictions:
    """The predictions of a language model for a text, to compare other models with. See
    [`eqquant.predictions`][].

    - `kept`: the predictions for each batch.
    """

    kept: list[Kept]

    @property
    def nbytes(self) -> int:
        """The size of the predictions in bytes."""
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
    """Keeps the predictions of a language model for a text, so that
    [`eqquant.evaluate`][] can compare any number of models with them, without running
    that model again.

    !!! Example

        ```python
        fn = lambda model, tokens: jax.vmap(model)(tokens)
        dense = eqquant.predictions(fn, model, batches)
        for format in ("int8", "nf4", "int4"):
            q = eqquant.tree_quantize(model, format)
            print(eqquant.evaluate(fn, q, batches, dense=dense))
        ```

    **Arguments:**

    - `fn`, `batches`: as in [`eqquant.evaluate`][].
    - `model`: the model. It is not needed afterwards.
    - `top`: how many of the most probable tokens to keep at each place, at 8 bytes
        each. By default, all are kept, at 4 bytes each. With `top`, divergences count
        the remaining tokens as one, which makes them smaller.

    **Returns:**

    An [`eqquant.Predictions`][], in host memory.

    **Raises:**

    A `ValueError` as in [`eqquant.evaluate`][], and if `top` is not positive.
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
    """Returns the predictions of a model, the loss of each token but the first, and the
    size of the vocabulary."""
    logs = log_probabilities(fn, model, text)
    if top is None or top >= logs.shape[-1]:
        favourites = Favourites(logs, None)
    else:
        favourites = Favourites(*jax.lax.top_k(logs, top))
    return favourites, loss_of_next(logs, text), logs.shape[-1]


def check_vocabulary(text: Integer[np.ndarray, "*b t"], size: int) -> None:
    """Raises a `ValueError` if a token is not in a vocabulary of a size."""
    if text.size and not 0 <= text.min() <= text.max() < size:
        raise ValueError(
            f"`batches` should have tokens from 0 to {size - 1}, of which `fn` gives "
            f"logits. Got tokens from {text.min()} to {text.max()}."
        )


def texts(
    batches: Iterable[Any],
) -> Iterator[tuple[Integer[np.ndarray, "*b t"], Bool[np.ndarray, "*b t"]]]:
    """Yields the tokens of each batch, and which of them count. Raises a `ValueError`
    if they are not integers, or if a mask is of another shape."""
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
    """Returns the log-probabilities of all tokens at each place. Raises a `ValueError`
    if `fn` does not return logits for each token."""
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
    """Returns the loss of each token but the first."""
    at = jnp.asarray(text)[..., 1:, None].astype(jnp.int32)
    found = jnp.take_along_axis(logs[..., :-1, :], at, axis=-1, mode="clip")
    return -found[..., 0]
