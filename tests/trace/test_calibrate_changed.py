import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import eqquant as eqq

from .test_calibrate import apply, check, gram, key, x


# Weights whose numbers are changed first: only the diagonal holds for them.
@pytest.mark.parametrize("in_scan", [False, True])
def test_changed_numbers(in_scan):
    params = {
        "exp": jr.normal(key, (3, 16, 16)),
        "masked": jr.normal(key, (3, 4, 16)),
        "mask": jnp.tri(4, 16) > 0,
        "symmetric": jr.normal(key, (3, 16, 16)),
        "spectral": [jr.normal(key, (16, 5)), jr.normal(key, (16, 5))],
        "position": jr.normal(key, (8, 16)),
    }

    def layer(params, x, i):
        x = jnp.tanh(x @ jax.nn.softplus(params["exp"][i]) + params["position"])
        masked = jnp.where(params["mask"], params["masked"][i], 0)
        symmetric = params["symmetric"][i] + params["symmetric"][i].T
        return x, (x @ symmetric, x @ masked.T)

    def fn(params, x):
        run = lambda x, i: layer(params, x, i)
        if in_scan:
            x, _ = lax.scan(run, x, jnp.arange(3))
        else:
            for i in range(3):
                x, _ = run(x, i)
        real, imaginary = params["spectral"]
        return lax.complex(x, 2 * x) @ lax.complex(real, imaginary)

    stats = eqq.calibrate(fn, params, [x, x])
    assert {*stats} == {"exp", "masked", "symmetric", "spectral.0", "spectral.1"}
    diagonal = lambda x: np.diagonal(gram(x))
    inputs, outputs, h = [], [], x
    for i in range(3):
        inputs.append(diagonal(h))
        h = layer(params, h, i)[0]
        outputs.append(diagonal(h))
    check(stats["exp"], 2 * np.stack(inputs)[:, None], np.full((3, 1), 16))
    outputs = 2 * np.stack(outputs)[:, None]
    check(stats["masked"], outputs, np.full((3, 1), 16))
    for axis in (1, 2):
        check(stats["symmetric", (axis,)], outputs, np.full((3, 1), 16))
    for name in ("spectral.0", "spectral.1"):
        check(stats[name], 2 * 5 * diagonal(h), 16)


def test_numbers_that_are_changed_in_one_of_two_products():
    w = jr.normal(key, (16, 16))
    fn = lambda w, x: (x @ jnp.exp(w["w"]), (2 * x) @ w["w"])
    check(eqq.calibrate(fn, {"w": w}, [x])["w"], 4 * gram(x), 8)


def test_weight_norm():
    layer = eqx.nn.WeightNorm(eqx.nn.Linear(16, 8, key=key))
    stats = eqq.calibrate(apply, layer, [x])
    check(stats["layer.weight"], np.diagonal(gram(x)), 8)
