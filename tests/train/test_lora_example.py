"""Adapters of dense weights that an example of a call tells."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import LoRA, lora, lora_only, merge_lora, with_lora

from ..helpers import normal
from .test_fake_quantize_example import call, models, run


def is_lora(x):
    return isinstance(x, LoRA)


def adapters(model):
    return [w for w in jtu.tree_leaves(model, is_leaf=is_lora) if is_lora(w)]


def trained(model):
    """With thin matrices that are not zero."""
    of = lambda w: normal(*w.b.shape, seed=5) / 50
    new = lambda w: eqx.tree_at(lambda w: w.b, w, of(w)) if is_lora(w) else w
    return jtu.tree_map(new, model, is_leaf=is_lora)


def by_hand(model):
    """With sums in the place of adapters, by einsum."""

    def whole(w):
        if not is_lora(w):
            return w
        more = jnp.einsum("...nr,...rk->...nk", w.b, w.a)
        return jax.lax.stop_gradient(w.base) + w.scale * w.matrix.from_rows(more)

    return jtu.tree_map(whole, model, is_leaf=is_lora)


numbers = {
    **{"u-net": 10, "volumes": 3, "attention": 7, "ragged experts": 3},
    **{"mixture": 3, "scan": 2, "dict": 3},
}


# The call, its gradients, merging and files.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("dict", "u-net", "ragged experts", "volumes", "scan"))
def test_adapters(name, tmp_path):
    model, x = models[name][0]()
    plain = isinstance(model, dict)
    example, fn = ((run, (x,)), run) if plain else (x, call)
    made, spec = lora(model, 4, min_size=0, example=example, key=jr.key(0))
    assert len(adapters(made)) == numbers[name]
    new = trained(made)

    @eqx.filter_jit
    def both(new, x):
        train, frozen = eqx.partition(new, spec)

        def loss(train, fn, prepare):
            return jnp.sum(fn(prepare(eqx.combine(train, frozen)), x) ** 2)

        gradients = eqx.filter_value_and_grad(loss)
        return gradients(train, fn, lambda m: m), gradients(train, call, by_hand)

    found, wanted = map(jtu.tree_leaves, both(new, x))
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(a - b).max() <= 1e-3 * np.abs(b).max()

    merged = merge_lora(new)
    assert jtu.tree_structure(merged) == jtu.tree_structure(model)
    eqq.save(tmp_path / "adapters.safetensors", lora_only(new))
    loaded = eqq.load(tmp_path / "adapters.safetensors")
    again, _ = with_lora(model, loaded, example=example)
    for a, b in zip(jtu.tree_leaves(again), jtu.tree_leaves(new), strict=True):
        assert a is b or np.array_equal(a, b)
    assert jtu.tree_structure(again) == jtu.tree_structure(new)


class Apart(eqx.Module):
    apart: jax.Array
    conv: eqx.nn.Conv1d

    def __call__(self, x):
        return jnp.einsum("abt,aob->ot", self.conv(x).reshape(4, 8, -1), self.apart)


# What cannot have adapters is left out, whatever the filter, unless that names it.
def test_what_cannot_be_adapted():
    model = Apart(normal(4, 32, 8), eqx.nn.Conv1d(16, 32, 3, key=jr.key(0)))
    x = normal(16, 9)
    make = lambda spec: lora(model, 2, spec, example=x, key=jr.key(1))[0]
    for spec in (True, "int8", eqq.Rules([("*", True)])):
        with pytest.warns(UserWarning, match="No adapters for `apart`: its products"):
            made = make(spec)
        assert is_lora(made.conv.weight) and not is_lora(made.apart)
        assert type(made) is Apart and isinstance(made.conv, eqx.nn.Conv1d)
    for named in ("apart", "a*"):
        with pytest.raises(ValueError, match="Got `apart`, of shape"):
            make(eqq.Rules([(named, True), ("*", None)]))


def test_a_function_of_ordinary_arrays():
    model, x = models["dict"][0]()
    text = "cannot be adapted .* `call` passes it to functions.*eqquant.implicit"
    with pytest.raises(ValueError, match=text):
        lora(model, 4, min_size=0, example=(call, (x,)), key=jr.key(0))
