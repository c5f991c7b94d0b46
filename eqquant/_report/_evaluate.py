import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PyTree

from .._trace import check_batches, watched
from ._text import plain


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """How well a language model predicts a text. It prints as a table.

    Means are over tokens. Their standard errors take tokens to be independent.

    - `tokens`: the number of tokens that were predicted.
    - `loss`, `loss_error`: the cross-entropy, in nats per token, and its standard
        error.

    The rest compares with the dense model, and is `None` if there is none:

    - `dense_loss`: its cross-entropy.
    - `change`, `change_error`: by how much the loss differs from that, and the standard
        error of this difference. It is far smaller than those of the two losses, which
        are of the same tokens.
    - `divergence`: the Kullback-Leibler divergence of the predictions from those of the
        dense model, in nats per token.
    - `agreement`: the share of tokens for which both models have the same favourite.
    """

    tokens: int
    loss: float
    loss_error: float
    dense_loss: float | None = None
    change: float | None = None
    change_error: float | None = None
    divergence: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        add = table.add_row
        loss = f"{self.loss:.4f} ± {self.loss_error:.4f} nats per token"
        add("loss", f"{loss}, perplexity {self.perplexity:.4g}")
        if self.dense_loss is not None:
            perplexity = math.exp(self.dense_loss)
            dense = f"{self.dense_loss:.4f} nats per token, perplexity {perplexity:.4g}"
            add("loss of the dense model", dense)
            add("change", f"{self.change:+.5f} ± {self.change_error:.5f} nats")
            add("divergence", f"{self.divergence:.5f} nats")
            add("same favourite", f"{self.agreement:.2%} of {self.tokens:,} tokens")
        else:
            add("tokens", f"{self.tokens:,}")
        yield table


def evaluate(
    fn: Callable[[Any, Any], Any],
    model: PyTree,
    batches: Iterable[Any],
    dense: PyTree | None = None,
) -> Evaluation:
    """Measures how well a language model predicts a text, and what it lost by being
    quantized.

    !!! Example

        ```python
        fn = lambda model, tokens: jax.vmap(model)(tokens)
        print(eqquant.evaluate(fn, quantized, batches, dense=model))
        ```

    **Arguments:**

    - `fn`: a function `(model, tokens) -> logits`, with an axis of `logits` more than
        `tokens` has: the vocabulary. The logits at each place predict the next token.
        It is compiled.
    - `model`: the model.
    - `batches`: an iterable of arrays of `tokens`, with the place in the text last; or
        of pairs `(tokens, mask)`, where `mask` is false for tokens that do not count,
        such as padding.
    - `dense`: the model before it was quantized, to compare with.

    **Returns:**

    An [`eqquant.Evaluation`][], which prints as a table.

    **Raises:**

    A `ValueError` if `fn` gives logits of another shape, if a token is not in the
    vocabulary, and if there is no token to predict.
    """
    check_batches(batches)
    step = eqx.filter_jit(_step)
    parts = []
    for batch in watched(batches, "evaluating"):
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        tokens, mask = batch if pair else (batch, None)
        tokens = _checked(tokens)
        found, vocabulary = step(fn, model, dense, tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise ValueError(
                f"`batches` should have tokens from 0 to {vocabulary - 1}, of which "
                f"`fn` gives logits. Got tokens from {tokens.min()} to {tokens.max()}."
            )
        counts = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask)
        if counts.shape != tokens.shape or counts.dtype != bool:
            raise ValueError(
                f"`mask` should be booleans of the shape {tokens.shape} of `tokens`. "
                f"Got {counts.dtype.name}{list(counts.shape)}."
            )
        parts.append([np.asarray(a)[counts[..., 1:]] for a in found])
    each = [np.concatenate(part).astype(np.float64) for part in zip(*parts)]
    if not each or each[0].size == 0:
        raise ValueError("`batches` should have tokens to predict. Got none.")
    loss, *others = each
    result = Evaluation(loss.size, np.mean(loss).item(), _error(loss))
    if not others:
        return result
    of_dense, divergence, same = others
    return dataclasses.replace(
        result,
        dense_loss=np.mean(of_dense).item(),
        change=np.mean(loss - of_dense).item(),
        change_error=_error(loss - of_dense),
        divergence=np.mean(divergence).item(),
        agreement=np.mean(same).item(),
    )


def _error(a):
    return math.nan if a.size < 2 else (np.std(a, ddof=1) / np.sqrt(a.size)).item()


def _checked(tokens: Any) -> np.ndarray:
    shape = np.shape(tokens)
    tokens = np.asarray(tokens) if eqx.is_array(tokens) else None
    if tokens is None or not np.issubdtype(tokens.dtype, np.integer) or shape == ():
        raise ValueError(
            "`batches` should be arrays of integers, or pairs of one and a mask. Got "
            f"{type(tokens).__name__ if tokens is None else tokens.dtype}{list(shape)}."
        )
    return tokens


def _step(fn, model, dense, tokens):
    logits = _logits(fn, model, tokens)
    loss = -_of_next(logits, tokens)
    if dense is None:
        return (loss,), logits.shape[-1]
    others = _logits(fn, dense, tokens)
    gain = jnp.where(others > -jnp.inf, jnp.exp(others) * (others - logits), 0)
    same = jnp.argmax(logits, axis=-1) == jnp.argmax(others, axis=-1)
    divergence = jnp.sum(gain, axis=-1)[..., :-1]
    found = loss, -_of_next(others, tokens), divergence, same[..., :-1]
    return found, logits.shape[-1]


def _logits(fn, model, tokens) -> Float[Array, "*b t v"]:
    """The logarithms of the probabilities that a model gives to each token."""
    logits = fn(model, tokens)
    shape = getattr(logits, "shape", None)
    if shape is None or shape[:-1] != tokens.shape or len(shape) == 0:
        got = type(logits).__name__ if shape is None else f"the shape {shape}"
        raise ValueError(
            f"`fn` should give logits of the shape {(*tokens.shape, '...')} for tokens "
            f"of the shape {tokens.shape}. Got {got}."
        )
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _of_next(logits: Float[Array, "*b t v"], tokens: Integer[Array, "*b t"]):
    at = tokens[..., 1:, None].astype(jnp.int32)
    return jnp.take_along_axis(logits[..., :-1, :], at, axis=-1, mode="clip")[..., 0]
