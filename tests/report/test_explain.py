import io
import itertools as it
import operator

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant import explain, Problem
from eqquant.formats import Layout
from eqquant.kernels import _table
from eqquant.kernels.cpu._costs import measured

from ..helpers import native_formats, normal


@pytest.fixture
def register(monkeypatch):
    """Registers kernels until the end of a test."""
    monkeypatch.setattr(_table, "_table", list(_table._table))

    def register(name, refuse, activation=None, priority=99.0, error=1e-5, **others):
        def kernel(x, stored, problem):
            raise NotImplementedError

        kernel.__name__ = name
        eqq.register_kernel(
            "matmul",
            eqq.NF4,
            activation=activation,
            # Kernels of the library may be there already, at the priority of zero.
            priority=priority,
            supports=refuse,
            error=error,
            **others,
        )(kernel)

    return register


def _eight_rows(problem):
    return None if problem.rows == 8 else f"needs 8 rows, got {problem.rows}"


def _struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_refusals(register):
    register("eight", _eight_rows, error=1e-3)
    register("never", lambda problem: "is never right", priority=98.0)
    q = eqq.quantize(normal(64, 48))
    three = explain(_struct(3, 64), q)
    assert three.refused[:2] == [
        ("eight", "needs 8 rows, got 3"),
        ("never", "is never right"),
    ]
    assert three.kernel not in ("eight", "never")
    text = " ".join(str(three).split())
    assert "`eight` needs 8 rows, got 3." in text
    assert "`never` is never right." in text
    assert f"The kernel `{three.kernel}` computes the matmul of float32[3,64]" in text
    eight = explain(_struct(8, 64), q)
    assert (eight.kernel, eight.refused, eight.error) == ("eight", [], 1e-3)
    assert "at most 1e-03 of |x| @ |w|" in " ".join(str(eight).split())
    assert "refused" not in str(eight)


def test_a_kernel_that_was_not_measured(register):
    register("new", lambda problem: None, priority=0.0, seconds=measured("new"))
    found = explain(_struct(3, 64), eqq.quantize(normal(64, 48)))
    assert found.kernel != "new" and "new" not in found.seconds
    assert "not measured" in dict(found.refused)["new"]


def test_precision_is_of_the_context(register):
    register("rough", lambda problem: None, error=1e-2)
    q = eqq.quantize(normal(64, 48))
    assert explain(_struct(3, 64), q).kernel == "rough"
    with jax.default_matmul_precision("highest"):
        refused = dict(explain(_struct(3, 64), q).refused)
    assert "1e-02" in refused["rough"]


@pytest.mark.parametrize(
    "x, w, axis, product, rows, n, k, stack",
    [
        ((5, 64), (64, 48), -2, "matmul", 5, 48, 64, 1),
        ((5, 64), (64, 48), -1, "matmul_transposed", 5, 64, 48, 1),
        ((64,), (64, 48), -2, "matmul", 1, 48, 64, 1),
        ((2, 5, 64), (64, 48), -2, "matmul", 10, 48, 64, 1),
        ((5, 64), (64,), -1, "matmul", 5, 1, 64, 1),
        ((3, 5, 64), (3, 64, 48), -2, "matmul", 5, 48, 64, 3),
    ],
)
def test_problem(x, w, axis, product, rows, n, k, stack):
    q = jax.eval_shape(lambda: eqq.quantize(normal(*w), eqq.Ternary(), axis=axis))
    assert explain(_struct(*x), q).problem == Problem(
        product=product,
        platform="cpu",
        layout=Layout(eqq.Ternary(), q.layout.tail, -2 if len(w) == 1 else -1),
        activation=None,
        rows=rows,
        n=n,
        k=k,
        stack=stack,
        dtype=jnp.dtype("float32"),
        precision=None,
    )


@native_formats
def test_formats(format):
    q = jax.eval_shape(lambda w: eqq.quantize(w, format), _struct(70, 3))
    problem = explain(_struct(5, 70), q).problem
    assert problem is not None
    # (Kernels multiply what is rotated already.)
    inner = format.format if isinstance(format, eqq.Rotated) else format
    assert (problem.format, problem.rows, problem.n, problem.k) == (inner, 5, 3, 70)


def test_rotated():
    q = jax.eval_shape(lambda w: eqq.quantize(w, "rotated"), _struct(64, 48))
    assert "x is rotated first, as Rotated() asks." in repr(explain(_struct(2, 64), q))
    assert "The product is rotated back" in repr(explain(_struct(2, 48), q.T))


# What is explained is what runs.
def test_problem_is_that_of_the_product(register):
    asked = []
    refuse = lambda problem: asked.append(problem) or "only asks"
    register("asked", refuse)
    register("asked", refuse, activation=eqq.AbstractFormat)
    dtypes = ("float32", "bfloat16", "int32", "complex64")
    shapes = ((64,), (3, 64), (2, 3, 64), (0, 64))
    for activation in (None, eqq.Int8()):
        q = eqq.quantize(normal(64, 32), activation=activation)
        for dtype, shape in it.product(dtypes, shapes):
            asked.clear()
            jax.jit(operator.matmul).lower(_struct(*shape, dtype=dtype), q)
            (problem,) = asked
            assert explain(_struct(*shape, dtype=dtype), q).problem == problem


def test_operands():
    q = eqq.quantize(normal(64, 48))
    expected = explain(_struct(3, 64), q).problem
    assert explain(jnp.ones((3, 64)), q).problem == expected
    assert explain(np.ones((3, 64), np.float32), q).problem == expected
    skeleton = jax.eval_shape(lambda: q)
    assert explain(_struct(3, 64), skeleton).problem == expected
    found = []
    jax.jit(lambda x, q: found.append(explain(x, q)))(jnp.ones((3, 64)), q)
    assert found[0].problem == expected


def test_unknown_number_of_rows():
    (m,) = jax.export.symbolic_shape("m")
    found = explain(_struct(m, 64), eqq.quantize(normal(64, 48)))
    assert found.problem is not None and found.problem.rows is None
    assert "float32[?,64]" in " ".join(str(found).split())


@pytest.mark.parametrize("axis", [-3, (-3, -2)])
def test_dequantized(axis):
    q = eqq.quantize(normal(4, 16, 48), axis=axis)
    found = explain(_struct(4, 3, 16), q)
    assert (found.problem, found.kernel, found.error) == (None, None, None)
    assert found.refused == []
    text = " ".join(str(found).split())
    assert f"lie along axis {axis}" in text
    assert "dequantized to f32[4,16,48], 12.3 kB" in text


def test_only_the_reference(monkeypatch):
    monkeypatch.setattr(_table, "_table", [])
    found = explain(_struct(3, 64), eqq.quantize(normal(64, 48)))
    assert (found.kernel, found.refused, found.error) == ("reference", [], 1e-5)
    assert "There is no other kernel for this." in " ".join(str(found).split())


@pytest.mark.parametrize("width", [80, 160])
def test_looks(register, width):
    register("eight", _eight_rows)
    found = explain(_struct(3, 64), eqq.quantize(normal(64, 48)))
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(found)
    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "  `eight` needs 8 rows, got 3." in lines


def test_mistakes():
    q = eqq.quantize(normal(64, 48))
    with pytest.raises(TypeError, match="`w` should be a `QuantizedArray`"):
        explain(_struct(3, 64), normal(64, 48))
    with pytest.raises(TypeError, match="`x` should be an array"):
        explain(1.0, q)
    with pytest.raises(ValueError, match="cannot contract"):
        explain(_struct(3, 63), q)
