"""The error of products, of that of rounding to nearest, on inputs that the Gram
matrix has not seen; and the error of the Gram matrix."""

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq
from eqquant.formats import Layout

from . import oracle


_four = eqq.Int4(64), eqq.Int4(64, symmetric=False), eqq.NF4(64)
_two = (eqq.Int(2, 64, "minimum"),)
targets = [
    *((format, "correlated", 0.66) for format in _four),
    *((format, "correlated", 0.52) for format in _two),
    *((format, "outliers", 0.30) for format in (*_four, *_two)),
]


kinds = {"correlated": "that are correlated", "outliers": "with outlier channels"}


def errors():
    k = 512
    w = np.random.default_rng(5).standard_normal((64, k)).astype(np.float32)
    for format, kind, most in targets:
        x = oracle.inputs(kind, k, rows=8192)
        seen, new = oracle.gram(x[:4096]), oracle.gram(x[4096:])
        plain = eqq.quantize(w, format, axis=-1)
        stored = eqq.GPTQ().solve(jnp.asarray(w), format, jnp.asarray(seen))
        found = Layout(format).trimmed(stored, k).decode(stored)
        lost = [np.sum(oracle.error(w, q, new)) for q in (found, plain)]
        yield f"{format}, inputs {kinds[kind]}", np.sqrt(lost[0] / lost[1]), most
    x = np.random.default_rng(6).standard_normal((4096, k)).astype(np.float32)
    batches = jnp.split(jnp.asarray(x), 4)
    model = {"w": jnp.asarray(w.T)}
    apply = lambda model, x: x @ model["w"]
    gram = eqq.calibrate(apply, model, batches)["w"].value.reshape(k, k)
    exact = x.astype(np.float64).T @ x.astype(np.float64)
    far = np.max(np.abs(np.asarray(gram) - exact)) / np.max(np.abs(exact))
    yield "a Gram matrix, from that in float64", far, 1e-5
    if jax.device_count() > 1:
        number = jax.device_count()
        mesh = jax.make_mesh((number,), ("data",))
        split = jax.NamedSharding(mesh, jax.P("data"))
        batches = [jax.device_put(x, split) for x in batches]
        again = eqq.calibrate(apply, model, batches)["w"].value.reshape(k, k)
        far = np.max(np.abs(np.asarray(gram) - np.asarray(again))) / np.max(exact)
        yield f"a Gram matrix on {number} devices, from that on one", far, 1e-5
