import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._progress import Watched
from .._trace import check_batches
from ._predictions import (
    check_vocabulary,
    log_probabilities,
    loss_of_next,
    predicted,
    Predictions,
    texts,
)
from ._text import plain


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """How well a language model predicts a text. It prints as a table.

    Means are over tokens. Their standard errors assume that tokens are independent.

    - `tokens`: the number of tokens that were predicted.
    - `loss`, `loss_error`: the cross-entropy, in nats per token, and its standard
        error.

    The other fields compare with the dense model, and are `None` if none was given:

    - `dense_loss`: the cross-entropy of the dense model.
    - `change`, `change_error`: the loss minus `dense_loss`, and the standard error of
        this difference. It is far smaller than the standard errors of the two losses,
        since both are over the same tokens.
    - `divergence`: the Kullback-Leibler divergence from the predictions of the dense
        model, in nats per token.
    - `agreement`: the share of tokens for which both models have the same most probable
        token.
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
    dense: PyTree | Predictions | None = None,
) -> Evaluation:
    """Measures how well a language model predicts a text, and how much quantization
    costs.

    !!! Example

        ```python
        fn = lambda model, tokens: jax.vmap(model)(tokens)
        print(eqquant.evaluate(fn, quantized, batches, dense=model))
        ```

    **Arguments:**

    - `fn`: a function `(model, tokens) -> logits`, where `logits` has one more axis
        than `tokens`, the vocabulary. The logits at each place predict the next token.
        `fn` is compiled.
    - `model`: the model.
    - `batches`: an iterable of arrays of `tokens`, with the place in the text last; or
        of pairs `(tokens, mask)`, where `mask` is false for tokens that do not count,
        such as padding.
    - `dense`: the model before it was quantized, to compare with. To compare several
        models with it, pass the result of [`eqquant.predictions`][] instead, which runs
        the dense model once.

    **Returns:**

    An [`eqquant.Evaluation`][], which prints as a table.

    **Raises:**

    A `ValueError` if `fn` returns logits of another shape, if a token is not in the
    vocabulary, if there is no token to predict, or if `dense` has predictions for other
    batches.
    """
    check_batches(batches)
    step, predict = eqx.filter_jit(_step), eqx.filter_jit(predicted)
    kept = dense.kept if isinstance(dense, Predictions) else None
    parts = []
    for i, (text, counts) in enumerate(texts(Watched(batches, "Evaluating"))):
        others = None
        if kept is not None:
            others = _of_same(kept, i, text)
        elif dense is not None:
            others = predict(fn, dense, text, None)[:2]
        found, size = step(fn, model, text, others)
        check_vocabulary(text, size)
        parts.append([np.asarray(a)[counts[..., 1:]] for a in found])
    if kept is not None and len(parts) < len(kept):
        raise ValueError(
            f"`dense` has predictions of {len(kept)} batches. Got {len(parts)} batches."
        )
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


def _of_same(kept, i, text):
    if i >= len(kept) or not np.array_equal(kept[i].text, text):
        raise ValueError(
            f"`dense` should have predictions of the same batches. Batch {i} has other "
            "tokens, or is not among them. Pass both the same list."
        )
    return kept[i].favourites, kept[i].of_next


def _error(a):
    return math.nan if a.size < 2 else (np.std(a, ddof=1) / np.sqrt(a.size)).item()


def _step(fn, model, text, others):
    logs = log_probabilities(fn, model, text)
    loss = loss_of_next(logs, text)
    if others is None:
        return (loss,), logs.shape[-1]
    favourites, of_next = others
    divergence = favourites.divergence(logs)[..., :-1]
    same = (jnp.argmax(logs, axis=-1) == favourites.first)[..., :-1]
    return (loss, of_next, divergence, same), logs.shape[-1]
