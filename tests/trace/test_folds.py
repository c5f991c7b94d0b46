import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant.demo import LanguageModel


fn = lambda model, x: jax.vmap(model)(x)


def folds(model, x, fn=fn):
    """The paths of each fold."""
    stats = eqq.calibrate(fn, model, [x])
    names = lambda paths: tuple(path for path, _ in paths)
    return [(names(a), names(b)) for a, b in stats.folds]


def with_folds_applied(model, stats, seed=0):
    """The model in which each fold has moved random scales."""
    leaves, treedef = jtu.tree_flatten_with_path(model)
    name = lambda path: jtu.keystr(path, simple=True, separator=".")
    arrays = {name(path): leaf for path, leaf in leaves}
    for i, (factors, weights) in enumerate(stats.folds):
        path, axes = weights[0]
        channels = [arrays[path].shape[i] for i in axes]
        scales = jnp.exp(jr.normal(jr.key(seed + i), (np.prod(channels),)))
        for path, axes in (*factors, *weights):
            shape = arrays[path].shape
            sizes = [n if i in axes else 1 for i, n in enumerate(shape)]
            s = scales.reshape(sizes)
            arrays[path] *= s if (path, axes) in weights else 1 / s
    return jtu.tree_unflatten(treedef, [arrays[name(path)] for path, _ in leaves])


class Net(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    gate: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x):
        y = self.norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def net():
    keys = jr.split(jr.key(0), 3)
    linear = eqx.nn.Linear
    return Net(
        eqx.nn.LayerNorm(32),
        linear(32, 48, key=keys[0]),
        linear(32, 48, key=keys[1]),
        linear(48, 32, key=keys[2]),
    )


class Heads(eqx.Module):
    """Attention by einsums, whose value heads are as many as the others."""

    scale: jax.Array
    qk: jax.Array
    v: jax.Array
    out: jax.Array

    def __call__(self, x):
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True) * self.scale[None]
        q, k = jnp.einsum("ti,aihd->athd", x, self.qk)
        p = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k))
        v = jnp.einsum("ti,ihd->thd", x, self.v)
        return jnp.einsum("hst,thd,hdo->so", p, v, self.out)


def heads():
    keys = jr.split(jr.key(0), 4)
    shapes = ((32,), (2, 32, 4, 8), (32, 4, 8), (4, 8, 32))
    return Heads(*(jr.normal(k, s) for k, s in zip(keys, shapes)))


x = jr.normal(jr.key(9), (6, 32))
text = jr.randint(jr.key(1), (2, 17), 0, 256).astype(jnp.uint8)
models = {
    "gated": (net, x, 2),
    "heads": (heads, x[None], 2),
    "relu": (lambda: eqx.nn.MLP(32, 16, 48, depth=2, key=jr.key(0)), x, 2),
    "attention": (
        lambda: (
            eqx.nn.Lambda(None)
            and Self(eqx.nn.MultiheadAttention(4, 32, key=jr.key(0)))
        ),
        x[None],
        1,
    ),
    "scanned": (lambda: LanguageModel(32, 2, 4, key=jr.key(0)), text, 3),
}


class Self(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x):
        return self.attention(x, x, x)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", models)
def test_a_fold_changes_nothing(name):
    make, x, number = models[name]
    model = make()
    # (Norms begin with ones and zeros.)
    model = jtu.tree_map(
        lambda a: (
            a + 0.1 * jr.normal(jr.key(a.size), a.shape)
            if eqx.is_inexact_array(a)
            else a
        ),
        model,
    )
    stats = eqq.calibrate(fn, model, [x])
    assert len(stats.folds) == number
    scaled = with_folds_applied(model, stats)
    for factors, weights in stats.folds:
        for path, _ in (*factors, *weights):
            assert path in [
                jtu.keystr(p, simple=True, separator=".")
                for p, a in jtu.tree_flatten_with_path(model)[0]
            ]
    assert not eqx.tree_equal(scaled, model)
    np.testing.assert_allclose(
        fn(scaled, x), fn(model, x), rtol=2e-3, atol=2e-3 * np.abs(fn(model, x)).max()
    )


def test_which():
    assert folds(net(), x) == [
        (("norm.bias", "norm.weight"), ("gate.weight", "up.weight")),
        (("up.bias", "up.weight"), ("down.weight",)),
    ]
    assert folds(heads(), x[None]) == [
        (("scale",), ("qk", "v")),
        (("v",), ("out",)),
    ]


class Changed(eqx.Module):
    """What makes a scale of `norm` impossible to move into `linear`."""

    norm: jax.Array
    linear: jax.Array
    other: jax.Array
    how: str = eqx.field(static=True)

    def __call__(self, x):
        y = x * self.norm
        if self.how == "residual":
            return y + self.linear @ y
        if self.how == "returned":
            return y, self.linear @ y
        if self.how == "nonlinear":
            return self.linear @ jnp.tanh(y)
        if self.how == "one more":
            return self.linear @ (x * (1 + self.norm))
        if self.how == "summed":
            return self.linear @ y + jnp.sum(y)
        if self.how == "used again":
            return self.linear @ y + jnp.sum(self.norm)
        if self.how == "twice":
            return self.linear @ (y * self.norm)
        if self.how == "weight used again":
            return self.linear @ y + self.linear @ x
        if self.how == "weight in sight":
            return self.linear @ y + jnp.sum(self.linear)
        if self.how == "turned":
            return self.linear @ y[::-1]
        if self.how == "part":
            return self.linear[:, :16] @ y[:16]
        if self.how == "branch":
            return lax.cond(x[0] > 0, lambda: self.linear @ y, lambda: 2 * y)
        if self.how == "loop":
            return lax.fori_loop(0, 2, lambda _, z: self.linear @ z, y)
        if self.how == "in a concatenation":
            both = jnp.concatenate([y, jnp.sin(x) * self.other])
            return self.linear @ y + jnp.sum(both)
        if self.how == "as integers":
            return self.linear @ y.astype(jnp.int32).astype(jnp.float32)
        if self.how == "other":
            return self.linear @ (y + x)
        assert self.how == "plain"
        return self.linear @ y


hows = ("residual", "returned", "nonlinear", "one more", "summed", "used again")
hows += ("twice", "weight used again", "weight in sight", "turned", "part", "branch")
hows += ("loop", "other", "in a concatenation", "as integers")


@pytest.mark.parametrize("how", ("plain", *hows))
def test_only_what_is_proved(how):
    shapes = ((32,), (32, 32), (32,))
    model = Changed(*(jr.normal(jr.key(i), s) for i, s in enumerate(shapes)), how)
    try:
        found = folds(model, x)
    except ValueError as e:
        # (These have no Gram.)
        assert how in ("part", "branch") and "no product" in str(e)
        return
    assert found == ([(("norm",), ("linear",))] if how == "plain" else [])


def test_grouped_heads_share_their_values():
    class Grouped(eqx.Module):
        v: jax.Array
        out: jax.Array

        def __call__(self, x):
            v = jnp.einsum("ti,ihd->thd", x, self.v)
            v = jnp.repeat(v, 2, axis=1)
            return jnp.einsum("thd,hdo->to", v, self.out)

    model = Grouped(jr.normal(jr.key(0), (32, 2, 8)), jr.normal(jr.key(1), (4, 8, 32)))
    assert folds(model, x[None]) == []


def test_kept_with_statistics(tmp_path):
    a, b = (eqq.calibrate(fn, net(), [x]) for _ in range(2))
    assert (a + b).folds == a.folds != ()
    eqq.save(tmp_path / "stats.safetensors", a.as_tree())
    tree = eqq.load(tmp_path / "stats.safetensors")
    assert eqq.Statistics.from_tree(tree).folds == a.folds
    for other in ([a], {"values": 1}):
        with pytest.raises(ValueError, match="`tree` should come from"):
            eqq.Statistics.from_tree(other)
