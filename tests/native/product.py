"""Multiplies with the native library of the eqquant that is installed."""

import pathlib
import sys

import jax.numpy as jnp
import jax.random as jr

import eqquant as eqq


def main():
    # Not the one that this file lies beside.
    assert pathlib.Path(eqq.__file__).is_relative_to(sys.prefix), eqq.__file__
    x, w = jr.normal(jr.key(0), (3, 100)), jr.normal(jr.key(1), (100, 70))
    for format in ("nf4", "int8", "ternary", "binary"):
        q = eqq.quantize(w, format)
        y = eqq.qmatmul(x, q, kernel="native")
        size = jnp.abs(x) @ jnp.abs(q.dequantize())
        assert jnp.all(jnp.abs(y - x @ q.dequantize()) <= 1e-5 * size), format
    print(eqq.explain(x, q))


if __name__ == "__main__":
    main()
