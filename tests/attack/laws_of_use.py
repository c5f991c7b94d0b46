"""What is made of an array: comparisons, files and exported programs."""

import operator
import tempfile

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from .same import equal, same


_arithmetic = (operator.add, operator.sub, operator.mul, operator.truediv)
_comparisons = (operator.lt, operator.le, operator.gt, operator.ge)
_equality = (operator.eq, operator.ne)


def compared(case, q, d, w):
    others = (0, 1.5, d, np.asarray(d), jnp.asarray(0.5, d.dtype))
    for op in (*_arithmetic, *_comparisons, *_equality):
        other = case.pick(others)
        with jax.numpy_dtype_promotion("standard"):
            yield f"{op.__name__}, {_kind(other)}", _agrees(op, q, d, other)
            name = f"reflected {op.__name__}, {_kind(other)}"
            yield name, _agrees(lambda a, b: op(b, a), q, d, other)
    yield "neg", equal(-q, -d)
    yield "abs", equal(abs(q), abs(d))


def _kind(other):
    return type(other).__name__


def _agrees(op, q, d, other):
    # (A NumPy array cannot be compared with one of JAX in all dtypes.)
    expected = op(d, jnp.asarray(other, d.dtype) if np.ndim(other) else other)
    found = op(q, other)
    return eqx.is_array(found) and equal(found, expected)


def saved(case, q, d, w):
    tree = {"a.b": q, "a": {"b": eqq.tree_prepack(q, "gpu")}, "c": [d, 1.5, "x"]}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/m.safetensors"
        eqq.save(path, tree)
        loaded, like = eqq.load(path), eqq.load(path, like=tree)
    plain = eqq.tree_prepack(tree, "cpu")
    for name, found in (("load", loaded), ("load like", like)):
        packed = eqq.tree_prepack(found["a.b"], "cpu")
        yield f"{name}, quantized", same(packed, plain["a.b"])
        yield f"{name}, nested", equal(found["a"]["b"], d)
        yield f"{name}, dense", same(found["c"][0], d)


def exported(case, q, d, w):
    # In a program, and as its argument.
    if q.ndim != 2 or q.activation is not None:
        return
    x = jnp.asarray(case.rng.standard_normal((3, q.shape[0])), jnp.float32)
    run = lambda x, q: eqq.qmatmul(x, q, kernel="reference")
    expected = jax.jit(run)(x, q)
    inside = jax.export.export(jax.jit(lambda x: run(x, q)))(x)
    inside = jax.export.deserialize(inside.serialize())
    yield "inside", np.allclose(inside.call(x), expected, 1e-5, 1e-5, equal_nan=True)
    outside = jax.export.export(jax.jit(run))(x, q)
    outside = jax.export.deserialize(outside.serialize())
    found = outside.call(x, q)
    yield "argument", np.allclose(found, expected, 1e-5, 1e-5, equal_nan=True)


laws = (compared, saved, exported)
