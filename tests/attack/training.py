import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax

import eqquant as eqq

from . import inputs
from .case import Case
from .formats import draw_format, name_of
from .same import equal, same


class _Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def _draw_rounding(case):
    format = draw_format(case)
    return eqq.NF4() if isinstance(format, eqq.formats.AbstractExact) else format


def training(case: Case) -> None:
    """A step of a plain loop: no quantized array changes, all else as of the
    dequantized model."""
    format = _draw_rounding(case)
    sizes = [case.pick((33, 48, 64, 128)) for _ in range(3)]
    a, b = jr.split(jr.key(case.number))
    dense = _Model(
        eqx.nn.Linear(*sizes[:2], key=a),
        eqx.nn.LayerNorm(sizes[1]),
        eqx.nn.Linear(*sizes[1:], key=b),
    )
    names = dict(kind="training", format=name_of(format))
    model = eqq.tree_quantize(dense, format, min_size=0)
    dense = eqq.tree_dequantize(model)
    x = inputs.draw_inputs(case, (8, sizes[0]), "normal", jnp.float32)
    optimizer = case.pick((optax.adamw(1e-2), optax.sgd(1e-2), optax.lion(1e-3)))
    with jax.numpy_dtype_promotion("standard"):
        new, gradients = _step(optimizer, model, x)
    expected = eqx.filter_grad(_loss)(dense, x)
    for name in ("first", "second"):
        old, now = getattr(model, name).weight, getattr(new, name).weight
        case.expect(f"{format}: {name}.weight is as it was", same(old, now), **names)
        case.expect(f"{format}: {name}.weight", eqq.is_quantized(now), **names)
        found = getattr(gradients, name).bias
        wanted = getattr(expected, name).bias
        close = np.allclose(found, wanted, rtol=1e-3, atol=1e-4)
        case.expect(f"{format}: gradient of {name}.bias", close, **names)
    changed = not equal(new.second.bias, model.second.bias)
    case.expect(f"{format}: bias is trained", changed, **names)


def _loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def _step(optimizer, model, x):
    @eqx.filter_jit
    def step(model, x):
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        gradients = eqx.filter_grad(_loss)(model, x)
        trained = eqx.filter(model, eqx.is_inexact_array)
        updates, _ = optimizer.update(gradients, state, trained)
        return eqx.apply_updates(model, updates), gradients

    return step(model, x)


# Names in dictionaries, which may look like the paths of others.
_names = ("a", "b", "a.b", "a.b.c", "b.c", "0", "0.a")


def _tree(case: Case, depth: int):
    if depth == 0 or case.chance(0.3):
        w = case.rng.standard_normal((case.pick((32, 33)), 32))
        return jnp.asarray(w, jnp.float32)
    if case.chance(0.3):
        return [_tree(case, depth - 1) for _ in range(case.integer(1, 2))]
    chosen = case.rng.permutation(len(_names))[: case.integer(1, 3)]
    return {_names[int(i)]: _tree(case, depth - 1) for i in chosen}


def adapters(case: Case) -> None:
    """LoRA of any tree: what is kept of the adapters is all of them."""
    tree = {"a": _tree(case, 3), "a.b": _tree(case, 1), "z": _tree(case, 2)}
    model = eqq.tree_quantize(tree, _draw_rounding(case), min_size=0)
    adapted, spec = eqq.train.lora(
        model, rank=2, min_size=0, key=jr.key(case.number), dora=case.chance(0.3)
    )
    trained = _moved(adapted, spec)
    again, _ = eqq.train.with_lora(model, eqq.train.lora_only(trained))
    names = dict(kind="adapters")
    about = f"{jtu.tree_structure(tree)}"
    case.expect(f"{about}: with_lora of lora_only", same(again, trained), **names)
    merged = eqq.train.merge_lora(trained)
    number = len(jtu.tree_leaves(merged))
    case.expect(f"{about}: merged", number == len(jtu.tree_leaves(tree)), **names)


def _moved(adapted, spec):
    trained, frozen = eqx.partition(adapted, spec)
    return eqx.combine(jtu.tree_map(lambda a: a + 0.1, trained), frozen)
