from typing import Any

import jax.numpy as jnp
import numpy as np

from .case import Case


# What the rows of inputs, and of cotangents, are made of.
ordinary = (
    "normal",
    "heavy tails",
    "zeros",
    "one-hot",
    "subnormal",
    "tiny",
    "integers",
)
outlying = ("outliers", "own outliers", "one outlier")
wild = ("NaN", "inf", "huge")
kinds = ("normal", *ordinary, *outlying, *outlying, *wild, "NaN", "inf")


def draw_inputs(case: Case, shape: tuple[int, ...], kind: str, dtype: Any) -> Any:
    """An array of this kind. Those that are to be finite are, in each dtype."""
    x = _numbers(case.rng, shape, kind)
    if kind not in ("NaN", "inf"):
        largest = float(jnp.finfo(dtype).max) / 4
        x = np.clip(x, -largest, largest)
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def _numbers(rng, shape, kind):
    x = rng.standard_normal(shape)
    if kind == "normal" or x.size == 0:
        return x
    if kind == "heavy tails":
        return rng.standard_t(1.2, shape)
    if kind == "zeros":
        return np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    if kind == "one-hot":
        return _with(rng, np.zeros(shape), 1.0, 1, own=True)
    if kind == "integers":
        return rng.integers(-8, 9, shape).astype(float)
    if kind == "subnormal":
        return x * 1e-39
    if kind == "tiny":
        return x * 1e-30
    if kind == "huge":
        return x * 10.0 ** rng.integers(5, 31)
    few = max(1, int(rng.random() * 0.01 * shape[-1])) if shape else 1
    if kind == "one outlier":
        return _with(rng, x, 1e6, 1, own=False)
    if kind == "outliers":
        return _with(rng, x, 1e6 * rng.standard_normal(), few, own=False)
    if kind == "own outliers":
        return _with(rng, x, 1e6, few, own=True)
    value = np.nan if kind == "NaN" else rng.choice([np.inf, -np.inf])
    return _with(rng, x, value, few, own=rng.random() < 0.5, rows=0.5)


def _with(rng, x, value, number, own, rows=1.0):
    # With this value at some positions of each row, or of some of the rows.
    flat = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    places = rng.integers(flat.shape[1], size=(len(flat) if own else 1, number))
    places = np.broadcast_to(places, (len(flat), number))
    chosen = rng.random(len(flat)) < rows
    chosen[rng.integers(len(flat))] = True
    flat[np.nonzero(chosen)[0][:, None], places[chosen]] = value
    return flat.reshape(x.shape)
