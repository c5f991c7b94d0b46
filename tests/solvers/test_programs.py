import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._solvers._gram import lower_root
from eqquant._solvers._rounding import Rounding
from eqquant._solvers._search import grouped, in_groups, Search
from eqquant.formats import Layout, Parameters

from ..helpers import normal
from . import oracle


# Float32 cannot factor these, so a little is added; those that it can stay as they are.
@pytest.mark.parametrize("kind", ("few", "dead", "twice", "correlated"))
def test_singular_grams_are_factored(kind):
    h = oracle.gram(oracle.inputs(kind, 64))
    h = h / np.mean(np.diag(h))
    root = np.asarray(jax.jit(lower_root)(jnp.asarray(h)), np.float64)
    assert np.all(np.isfinite(root)) and np.all(np.triu(root, 1) == 0)
    more = root @ root.T - h
    added = np.mean(np.diag(more))
    np.testing.assert_allclose(more, added * np.eye(64), atol=1e-5)
    if kind == "correlated":
        np.testing.assert_allclose(root, np.linalg.cholesky(h), atol=1e-4)
        assert abs(added) < 1e-6
    else:
        assert added < 1e-4


def test_a_gram_of_nans_has_no_factor():
    root = jax.jit(lower_root)(jnp.full((4, 4), jnp.nan))
    assert np.all(np.isnan(np.diag(np.asarray(root))))


# Without a factor, all rows would be as rounded to nearest.
def test_gptq_without_damping():
    w, format = normal(16, 64, seed=2), eqq.Int(3, 32)
    h = oracle.gram(oracle.inputs("few", 64))
    stored = eqq.GPTQ(damping=0.0, passes=0).solve(w, format, jnp.asarray(h))
    found = np.asarray(Layout(format).decode(stored))
    plain = eqq.quantize(w, format, axis=-1)
    old, new = (np.sum(oracle.error(w, q, h)) for q in (plain, found))
    assert new < 0.3 * old


# (The first once more, in place of which there may be a refined one.)
def test_candidates_are_in_order():
    format = eqq.Int(3, 16)
    columns = jr.normal(jr.key(0), (16, 5, 2))
    search = Search(Rounding(format), columns, jnp.ones((16, 1, 2)))
    first = jax.jit(lambda: search.best(4, steps=0).scale)()
    found = jax.jit(
        lambda: format.held(
            format.candidates(
                jnp.moveaxis(columns, 0, -1), np.full((1, 2, 1), 16, np.float32)
            )
        )
    )().scale
    found, x = np.asarray(found, np.float64), np.moveaxis(np.asarray(columns), 0, -1)
    points = np.arange(-4, 4)
    far = np.abs(x[None, ..., None] - found[..., None] * points).min(-1)
    losses = np.sum(far.astype(np.float64) ** 2, -1)
    best = np.sort(losses, 0)[[0, 0, 1, 2]]
    scales = np.asarray(first, np.float64)[..., None, None]
    far = np.abs(x[None, ..., None] - scales * points).min(-1)
    np.testing.assert_allclose(np.sum(far**2, -1), best, rtol=1e-5)


@pytest.mark.parametrize("most", (0, 1, 2, 3, 5, 100))
def test_groups(most):
    xs = Parameters(jnp.arange(5.0), None)
    for a in grouped(xs, most):
        assert a is None or a.shape[1] <= max(most, 1)
    np.testing.assert_array_equal(in_groups(lambda p: 2 * p.scale, xs, most), 2 * xs[0])


class Counted(eqq.GPTQ):
    """Counts how often it is traced."""

    def choose(self, *args):
        traced.append(args[0].shape)
        return super().choose(*args)


traced = []
fn = lambda model, x: sum(x @ w for w in model)


# And all is done when the call returns.
def test_one_program_for_weights_of_one_shape():
    model = [normal(256, 256, seed=i) for i in range(3)]
    stats = eqq.calibrate(fn, model, [normal(300, 256)])
    found = eqq.tree_quantize(model, "int4", stats=stats, method=Counted(passes=1))
    assert all(a.is_ready() for a in jax.tree.leaves(found))
    assert traced == [(256, 256)]


@pytest.mark.parametrize("terminal", (False, True))
def test_progress(terminal, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    model = [normal(32, 32, seed=i) for i in range(2)]
    stats = eqq.calibrate(fn, model, [normal(64, 32)])
    eqq.tree_quantize(model, eqq.Int4(32), stats=stats)
    err = capsys.readouterr().err
    assert ("Quantizing" in err and "(compiling)" in err) == terminal
    assert terminal or err == ""


# The numbers of the arrays whose programs were compiled before give the time.
def test_what_takes_long_is_told(monkeypatch, capsys):
    from eqquant import _progress

    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    eqq.tree_quantize([normal(32, 32, seed=i) for i in range(4)])
    err = " ".join(capsys.readouterr().err.split())
    assert "takes about" in err and "minutes" in err
