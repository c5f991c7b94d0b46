import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant._array._array_like import AbstractArrayLike

from .helpers import normal


# Of a stack of matrices, that they are one is a guess, which is right here.
pytestmark = pytest.mark.filterwarnings("ignore:Adapters of .* which is a guess")


# Whatever stands in the place of an array has the members of one, and they give what
# those of the array that it stands for do: numbers and derivatives.


def adapted(w, **kwargs):
    model, _ = eqq.train.lora({"w": w}, 3, min_size=0, key=jr.key(0), **kwargs)
    leaf = model["w"]
    return eqx.tree_at(lambda w: w.b, leaf, 0.1 * normal(*leaf.b.shape, seed=3))


def fake(w, **kwargs):
    return eqq.train.tree_fake_quantize({"w": w}, "int8", min_size=0, **kwargs)["w"]


kinds = {
    "quantized": lambda w: eqq.quantize(w, "int8"),
    "quantized-across": lambda w: eqq.quantize(w, "nf4", axis=-1),
    "lora": adapted,
    "dora": lambda w: adapted(w, dora=True),
    "qlora": lambda w: adapted(eqq.quantize(w, "int8", axis=-1)),
    "fake": fake,
    "fake-steps": lambda w: fake(w, step_sizes=True),
}
every_kind = pytest.mark.parametrize("kind", kinds)
shapes = {"matrix": (16, 32), "stack": (3, 16, 32)}
every_shape = pytest.mark.parametrize("shape", shapes.values(), ids=shapes)

binary = "add sub mul truediv floordiv mod pow lt le gt ge".split()
members = {
    **{name: lambda w, name=name: getattr(operator, name)(w, 2.0) for name in binary},
    **{f"r{n}": lambda w, n=n: getattr(operator, n)(2.0, w) for n in binary},
    **{
        f"{n}-array": lambda w, n=n: getattr(operator, n)(w, w[..., :1])
        for n in binary[:4]
    },
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "divmod": lambda w: divmod(w, 2.0),
    "round": lambda w: round(w, 1),
    "matmul": lambda w: w @ jnp.ones((32, 5)),
    "rmatmul": lambda w: jnp.ones((5, 16)) @ w,
    "matvec": lambda w: w @ jnp.ones(32),
    "transpose": lambda w: w.transpose(),
    "transpose-last": lambda w: w.transpose(
        (*range(w.ndim - 2), w.ndim - 1, w.ndim - 2)
    ),
    "swapaxes": lambda w: w.swapaxes(-1, -2),
    "swapaxes-first": lambda w: w.swapaxes(0, -1),
    "mT": lambda w: w.mT,
    "mT-product": lambda w: w.mT @ jnp.ones((16, 5)),
    "reshape": lambda w: (w.reshape(-1, 4), w.reshape((4, -1))),
    "ravel": lambda w: (w.ravel(), w.flatten()),
    "squeeze": lambda w: w.squeeze(),
    "repeat": lambda w: w.repeat(2, axis=0),
    "astype": lambda w: w.astype(jnp.bfloat16),
    "at": lambda w: (w.at[0].set(1.0), w.at[..., 1].add(2.0), w.at[0].get()),
    "index": lambda w: (w[0], w[-1], w[1:], w[..., 0], w[None], w[:, 2:5]),
    "index-array": lambda w: (w[jnp.array([1, 0])], w[jnp.array(1), 2]),
    "iterate": lambda w: [*w],
    "len": lambda w: jnp.asarray(len(w)),
    "sizes": lambda w: jnp.asarray([w.ndim, w.size, w.itemsize, *w.shape]),
    "sum": lambda w: (w.sum(), w.sum(-1), w.sum(axis=0, keepdims=True)),
    "mean": lambda w: (w.mean(), w.mean(axis=-1)),
    "extremes": lambda w: (w.max(), w.min(axis=0), w.argmax(), w.argmin(-1)),
    "moments": lambda w: (w.std(), w.var(axis=-1), w.prod(axis=0)),
    "cumulated": lambda w: (w.cumsum(axis=0), w.cumprod(axis=-1)),
    "logic": lambda w: (w.all(), w.any(axis=0)),
    "sort": lambda w: (w.sort(axis=-1), w.argsort(axis=-1)),
    "clip": lambda w: w.clip(-0.5, 0.5),
    "dot": lambda w: w.dot(jnp.ones((32, 5))),
    "diagonal": lambda w: (w.diagonal(), w.trace()),
    "take": lambda w: w.take(jnp.array([3, 1]), axis=0, mode="clip"),
    "conj": lambda w: (w.conj(), w.real, w.imag, w.copy()),
    "numbers": lambda w: jnp.asarray(w[0].ravel()[0].item()),
}
traced = [name for name in members if name != "numbers"]


def dense(x):
    is_leaf = lambda x: isinstance(x, AbstractArrayLike)
    out = jtu.tree_map(
        lambda x: x.dequantize() if is_leaf(x) else x, x, is_leaf=is_leaf
    )
    return [jnp.asarray(leaf) for leaf in jtu.tree_leaves(out)]


def same(found, expected, tolerance=1e-4):
    for y, z in zip(found, expected, strict=True):
        assert (y.shape, y.dtype) == (z.shape, z.dtype)
        y, z = np.asarray(y, np.float64), np.asarray(z, np.float64)
        wide = tolerance * np.max(np.abs(z), initial=1e-3, where=np.isfinite(z))
        np.testing.assert_allclose(
            y, z, rtol=1e-2 if tolerance > 1e-4 else 1e-3, atol=wide
        )


@jax.jit
def every(w):
    return {name: dense(members[name](w)) for name in traced}


@pytest.mark.examples(1)
@every_kind
@every_shape
def test_members(kind, shape):
    # Powers of what is negative are NaN.
    w = kinds[kind](jnp.abs(normal(*shape)) + 0.1)
    assert isinstance(w, AbstractArrayLike)
    found, expected = every(w), every(w.dequantize())
    for name in traced:
        wide = (
            1e-2
            if name in ("astype", "matmul", "rmatmul", "matvec", "mT-product")
            else 1e-4
        )
        same(found[name], expected[name], wide)
    same(dense(members["numbers"](w)), dense(members["numbers"](w.dequantize())))


@every_kind
def test_all_members_of_arrays_are_there(kind):
    w = kinds[kind](normal(16, 32))
    # Those of buffers: of where and how the numbers lie.
    buffers = """addressable_data addressable_shards byteswap committed
    copy_to_host_async device flat global_shards is_fully_addressable
    is_fully_replicated nbytes sharding to_device view""".split()
    names = [name for name in dir(jax.Array) if name[0] != "_"]
    missing = [name for name in names if name not in (*buffers, *dir(w))]
    assert missing == []


floating = "mul truediv neg transpose swapaxes reshape at index sum mean extremes"
floating += " moments cumulated take dot matmul rmatmul mT-product astype"


@eqx.filter_jit
def gradients(w):
    """Of a loss of what each member gives, with respect to what is trained."""

    def losses(trained):
        w = eqx.combine(trained, rest)
        leaf = lambda y: jnp.sum(jnp.sin(y.astype(jnp.float32)))
        outs = {name: dense(members[name](w)) for name in floating.split()}
        floats = lambda ys: [y for y in ys if jnp.issubdtype(y.dtype, jnp.floating)]
        return {name: sum(map(leaf, floats(ys))) for name, ys in outs.items()}

    trained, rest = eqx.partition(w, eqx.is_inexact_array)
    return jax.jacrev(losses)(trained)


@eqx.filter_jit
def through_decoded(w, gradients):
    """The gradients with respect to what is trained, from those with respect to the
    ordinary array."""
    trained, rest = eqx.partition(w, eqx.is_inexact_array)
    decoded = lambda trained: eqx.combine(trained, rest).dequantize()
    _, pullback = jax.vjp(decoded, trained)
    return {name: pullback(gradient)[0] for name, gradient in gradients.items()}


@pytest.mark.examples(1)
@pytest.mark.parametrize("kind", [kind for kind in kinds if "quantized" not in kind])
def test_derivatives(kind):
    w = kinds[kind](jnp.abs(normal(16, 32)) + 0.1)
    found, expected = gradients(w), through_decoded(w, gradients(w.dequantize()))
    for name in floating.split():
        same(jtu.tree_leaves(found[name]), jtu.tree_leaves(expected[name]), 1e-2)
