import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant.train import trainable_spec, tree_fake_quantize

from ..helpers import main_formats, normal, trees_equal


def test_trainable_spec():
    model = eqq.tree_quantize(eqx.nn.MLP(64, 64, 64, 2, key=jr.key(0)))
    trained = eqx.filter(model, trainable_spec(model))
    assert trees_equal(trained, eqx.filter(model, eqx.is_inexact_array))
    assert len(jtu.tree_leaves(trained)) == 3
    fake = tree_fake_quantize(model.layers[0].weight.dequantize(), "int8")
    assert trainable_spec(fake).weight


class Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear
    third: eqx.nn.Linear
    steps: jax.Array

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.third(self.second(x))


# A training loop without any code for quantization, over a model with one quantized,
# one fake-quantized and one dense layer.
@pytest.mark.examples(1)
@main_formats
def test_naive_loop(format):
    a, b, c = jr.split(jr.key(0), 3)
    model = Model(
        eqx.nn.Linear(70, 40, key=a),
        eqx.nn.LayerNorm(40),
        eqx.nn.Linear(40, 40, key=b),
        eqx.nn.Linear(40, 30, key=c),
        jnp.asarray(0),
    )
    model = eqq.tree_quantize(model, eqq.Rules([("first.weight", format)]))
    model = tree_fake_quantize(model, eqq.Rules([("second.weight", format)]))
    old = average = model
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = normal(16, 70), normal(16, 30, seed=1)

    @eqx.filter_jit
    def step(model, average, state):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        gradients = eqx.filter_grad(loss)(model)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, parameters)
        model = eqx.apply_updates(model, updates)

        def ema(old, new):
            return 0.9 * old + 0.1 * new if eqx.is_inexact_array(new) else new

        return model, jtu.tree_map(ema, average, model), state

    for _ in range(3):
        model, average, state = step(model, average, state)
    for new in (model, average):
        assert trees_equal(new.first.weight, old.first.weight)
        assert not np.array_equal(new.second.weight.weight, old.second.weight.weight)
        assert not np.array_equal(new.third.weight, old.third.weight)
    # Nothing is kept for what is frozen.
    moments = jtu.tree_leaves(state[0].mu)
    assert sum(m.size for m in moments) == 40 + 2 * 40 + 41 * 40 + 41 * 30
