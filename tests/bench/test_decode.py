import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import bench
from eqquant.bench._decoder import Decoder, empty_past, random_decoder


_size = bench.Size(vocabulary=32, width=32, hidden=32, depth=1, heads=2, positions=6)


def test_rows():
    dense, row, *_ = bench.measure_decoding(
        ["int8"], size=_size, budget=0, min_rounds=3, seed=1
    )
    model = random_decoder(_size, 1)
    parameters = sum(a.size for a in jax.tree.leaves(model))
    assert (dense.name, dense.bits_per_weight) == ("float32", 32)
    assert dense.error < 1e-6
    assert dense.nbytes == 4 * parameters
    assert dense.times.ratio == 1
    total = eqq.report(eqq.tree_quantize(model, "int8")).total
    assert row.name == "Int8()"
    assert row.nbytes == total.after < dense.nbytes
    assert row.parameters == parameters
    assert 8 < row.bits_per_weight < 10
    # No kernel of Int8 errs by more than 1e-4 in a product.
    assert 0 < row.error < 1e-5
    assert row.times.baseline == dense.times.seconds
    assert len(row.times.seconds) == 3
    assert row.tokens_per_second == 1 / np.median(row.times.seconds)


def test_everything_but_the_embedding_is_quantized():
    model = eqq.tree_quantize(random_decoder(_size, 0), "int8")
    rows = eqq.report(model).rows
    dense = [row.path for row in rows if row.format is None and len(row.shape) > 1]
    assert dense == ["embedding.weight"]


def test_default_size():
    model = eqx.filter_eval_shape(Decoder, bench.Size(), key=jr.key(0))
    number = sum(a.size for a in jax.tree.leaves(model))
    assert 120e6 < number < 140e6


@pytest.fixture
def texts():
    model = random_decoder(_size, 2)
    step = jax.jit(lambda *args: model(*args))

    def read(tokens):
        past, found = empty_past(_size), []
        for i, token in enumerate(tokens):
            logits, past = step(jnp.asarray(token), jnp.asarray(i), past)
            found.append(logits)
        return np.stack(found)

    return read


def test_a_step_sees_what_was_before(texts):
    a, b = texts([1, 2, 3, 4]), texts([5, 2, 3, 7])
    assert np.all(np.isfinite(a))
    assert np.max(np.abs(a[2] - b[2])) > 0.01
    # The same token in the same place, after the same.
    c = texts([1, 2, 3, 9])
    assert np.array_equal(a[:3], c[:3])
    assert np.max(np.abs(a[3] - c[3])) > 0.01
    # Where it is matters.
    d = texts([2, 1, 3])
    assert np.max(np.abs(a[2] - d[2])) > 0.01
