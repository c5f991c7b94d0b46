import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant.train import tree_fake_quantize, tree_freeze


# Experiments. (What they train is tested by itself, as are the layers.)
pytestmark = pytest.mark.thorough
seeds, steps = 4, 600
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32)
    orders = [np.random.default_rng(seed).permutation(1797) for seed in range(seeds)]
    rows = np.split(np.stack(orders), [1297], axis=1)
    return [(jnp.asarray(pictures[i]), jnp.asarray(labels[i])) for i in rows]


@pytest.fixture(scope="module")
def untrained():
    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(64, 10, 128, depth=2, key=key))
    return make(jr.split(jr.key(0), seeds))


@pytest.fixture(scope="module")
def dense(untrained, digits):
    return fit(untrained, *digits[0], jr.split(jr.key(0), seeds))


def loss(model, x, y):
    logits = jax.vmap(model)(x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


@eqx.filter_jit
@eqx.filter_vmap
def fit(model, x, y, key):
    params, static = eqx.partition(model, eqq.trainable_spec(model))

    def step(carry, key):
        params, state = carry
        rows = jr.randint(key, (128,), 0, len(x))
        of_params = lambda params: loss(eqx.combine(params, static), x[rows], y[rows])
        updates, state = optimizer.update(jax.grad(of_params)(params), state)
        return (eqx.apply_updates(params, updates), state), None

    start = params, optimizer.init(params)
    (params, _), _ = jax.lax.scan(step, start, jr.split(key, steps))
    return eqx.combine(params, static)


def accuracy(models, digits):
    each = eqx.filter_vmap(lambda m, x, y: jnp.argmax(jax.vmap(m)(x), axis=-1) == y)
    return float(jnp.mean(eqx.filter_jit(each)(models, *digits[1])))


def quantized(models, format):
    return eqx.filter_vmap(lambda m: eqq.tree_quantize(m, format, min_size=0))(models)


def test_of_float32(dense, digits):
    assert accuracy(dense, digits) > 0.97


@pytest.mark.parametrize(
    "format,drop", (("int8", 0.005), ("nf4", 0.01), ("int4", 0.01))
)
def test_after_training(format, drop, dense, digits):
    got = accuracy(quantized(dense, format), digits)
    assert got >= accuracy(dense, digits) - drop


def test_of_ternary(dense, untrained, digits):
    reference = accuracy(dense, digits)
    after = accuracy(quantized(dense, "ternary"), digits)
    prepare = lambda m: tree_fake_quantize(m, "ternary", min_size=0)
    models = eqx.filter_vmap(prepare)(untrained)
    models = fit(models, *digits[0], jr.split(jr.key(0), seeds))
    frozen = eqx.filter_vmap(tree_freeze)(models)
    assert all(eqq.is_quantized(layer.weight) for layer in frozen.layers)
    during = accuracy(frozen, digits)
    assert after < reference - 0.03
    assert during >= reference - 0.015
    assert abs(during - accuracy(models, digits)) < 1e-6
