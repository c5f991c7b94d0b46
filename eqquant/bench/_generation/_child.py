"""Measures how fast a model reads and generates text, in a separate process.
`python -m eqquant.bench._generation._child` takes its options as a JSON object, and
prints its results as another."""

import functools as ft
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..._array import tree_prepack
from .._decoder import Decoder, empty_past, Size
from ._file import read_model


@ft.partial(jax.jit, static_argnames="number", donate_argnames="past")
def generate(
    model: Decoder, token: Int[Array, " b"], start: Any, past: Any, number: int
) -> tuple[Int[Array, "n b"], Any]:
    """Generates the most likely next tokens of several texts. One program runs all
    steps, and updates keys and values in place."""

    def step(state, i):
        token, past = state
        logits, past = jax.vmap(model, in_axes=(0, None, 0))(token, start + i, past)
        token = most_likely(logits).astype(token.dtype)
        return (token, past), token

    (_, past), tokens = lax.scan(step, (token, past), jnp.arange(number))
    return tokens, past


def most_likely(logits: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Returns the index of the first largest logit of each text. This is faster than
    `argmax`, which XLA:CPU does not vectorize; it does vectorize `max` and `min`."""
    i = jnp.arange(logits.shape[-1])
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == largest, i, logits.shape[-1] - 1), axis=-1)


def main(path: str, size: dict[str, int], prompts, streams, number, seconds) -> dict:
    found: dict[str, Any] = {"prefill": {}, "decode": {}, "first": []}
    jnp.zeros(1).block_until_ready()
    found["idle"] = memory()["resident"]
    model = tree_prepack(read_model(pathlib.Path(path), Size(**size)))
    token = lambda n: jnp.asarray(np.arange(n) * 7 % size["vocabulary"], jnp.int32)
    read = jax.jit(lambda model, *args: model.read(*args), donate_argnums=3)
    for n in prompts:
        empty = ft.partial(empty_cache, size, n)
        begin = lambda n=n, empty=empty: read(model, token(n), jnp.asarray(0), empty())
        logits, _ = begin()
        found["first"].append(np.asarray(logits)[:1000].tolist())
        found["prefill"][n] = n / _median(begin, seconds)
    length = prompts[0]
    past = empty_cache(size, length + number)
    _, past = read(model, token(length), jnp.asarray(0), past)
    for b in streams:
        many = jtu.tree_map(lambda x, b=b: jnp.stack([x] * b), past)
        state = [many]

        def call(b=b, state=state):
            tokens, past = generate(model, token(b), length, state.pop(), number)
            state.append(past)
            return tokens

        call()
        found["decode"][b] = b * number / _median(call, seconds)
    return found | memory()


def empty_cache(size: dict[str, int], positions: int) -> list[Float[Array, "2 h s c"]]:
    """Returns an empty cache in float16, like llama.cpp's."""
    return empty_past(Size(**size | {"positions": positions}), jnp.float16)


def _median(call: Callable[[], Any], seconds: float) -> float:
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def memory() -> dict[str, int | None]:
    """Returns the resident memory of this process now and at its peak, in bytes. `None`
    if the system does not report them."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text("utf-8").splitlines() if status.exists() else []
    values = dict(line.split(":", 1) for line in lines)
    bytes = lambda key: int(values[key].split()[0]) * 1024 if key in values else None
    return {"resident": bytes("VmRSS"), "most": bytes("VmHWM")}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
