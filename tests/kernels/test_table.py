from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqquant as eqq
import eqquant.kernels._table as table

from ..helpers import error, normal


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(table, "_table", [])
    yield
    jax.clear_caches()


# As a user would write them: a format, and a kernel for it, from the public names.
class Int2(eqq.AbstractGrid):
    """Four numbers, evenly spaced."""

    block_size: int | None = eqx.field(default=64, static=True)
    scale_dtype: Any = eqx.field(default=jnp.dtype("float32"), static=True)
    levels: ClassVar[int] = 4

    def fit(self, blocks, size):
        return jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 1.5

    def to_codes(self, blocks, size, scale):
        return jnp.clip(jnp.round(blocks / scale + 1.5), 0, 3).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1.5


def dense_rows(x, stored, problem):
    return x @ problem.decode(stored).T


def refuse_few_rows(problem):
    if problem.rows is None or problem.rows % 8 != 0:
        return f"needs a multiple of 8 rows, got {problem.rows}"


def test_a_format_from_outside():
    w, x = normal(192, 70), normal(9, 192)
    q = eqq.quantize(w, "int2")
    assert q.format == Int2()
    assert q.bits_per_weight == 2 + 32 / 64
    assert repr(q).startswith("QuantizedArray(f32[192,70], Int2(), axis=-2")
    assert jnp.max(jnp.abs(q.dequantize() - w)) <= jnp.max(q.scale) / 2 + 1e-6
    assert error(x @ q, x, q.dequantize()) < 1e-6
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(x @ q)))(x)
    assert jnp.allclose(gradient, jnp.ones((9, 70)) @ q.dequantize().T, atol=1e-4)
    model = eqq.tree_quantize(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), "int2")
    assert model.layers[0].weight.format == Int2()


def test_a_kernel_from_outside():
    ran = []

    @eqq.register_kernel("matmul", Int2, "cpu", supports=refuse_few_rows)
    def my_kernel(x, stored, problem):
        ran.append(problem)
        return dense_rows(x, stored, problem)

    q = eqq.quantize(normal(64, 48), Int2())
    # Whether it runs depends on the rows, however they came together.
    for x, taken in ((normal(9, 64), False), (normal(16, 64), True)):
        ran.clear()
        y = jax.jit(jax.vmap(lambda x: x @ q))(x)
        assert error(y, x, q.dequantize()) < 1e-6
        assert [problem.rows for problem in ran] == ([16] if taken else [])
    (problem,) = ran
    assert (problem.n, problem.k, problem.stack) == (48, 64, 1)
    assert problem.format == Int2() and problem.platform == "cpu"
    assert str(problem) == "matmul of float32[16,64] with Int2()[48,64], on cpu"

    # It may be asked for by name; and then it says why not.
    assert (
        error(
            eqq.qmatmul(normal(8, 64), q, kernel="my_kernel"),
            normal(8, 64),
            q.dequantize(),
        )
        < 1e-6
    )
    with pytest.raises(
        ValueError, match="my_kernel.*needs a multiple of 8 rows, got 3"
    ):
        eqq.qmatmul(normal(3, 64), q, kernel="my_kernel")
    # It is a kernel for the one product; the derivative takes another.
    assert jax.grad(lambda x: jnp.sum(x @ q))(normal(8, 64)).shape == (8, 64)
    # And for the one format.
    ran.clear()
    normal(16, 64) @ eqq.quantize(normal(64, 48), "nf4")
    assert ran == []


def test_stacked_weights_map_the_kernel():
    @eqq.register_kernel("matmul", Int2)
    def my_kernel(x, stored, problem):
        assert x.ndim == 2 and problem.stack == 5
        return dense_rows(x, stored, problem)

    q, x = eqq.quantize(normal(5, 64, 48), Int2()), normal(5, 7, 64)
    assert error(x @ q, x, q.dequantize()) < 1e-6


# The higher priority is first, then the more specific class; and what is asked for of
# the activations has to match.
def test_order():
    def register(name, *args, **kwargs):
        def kernel(x, stored, problem):
            return dense_rows(x, stored, problem)

        kernel.__name__ = name
        eqq.register_kernel("matmul", *args, **kwargs)(kernel)

    register("any", eqq.AbstractFormat)
    register("low", Int2)
    register("high", Int2, priority=1, supports=refuse_few_rows)
    register("rough", Int2, priority=2, error=1e-2, supports=refuse_few_rows)
    register("elsewhere", Int2, "tpu", priority=9)
    register("rounded", Int2, activation=eqq.Int8)

    def chosen(x, w, **kwargs):
        choice = []
        real = table.choose

        def spy(problem, name=None):
            choice.append(real(problem, name))
            return choice[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eqquant._product._primitive.choose", spy)
            jax.jit(lambda x: eqq.qmatmul(x, w, **kwargs)).lower(x)
        return choice[-1].kernel.name

    q = eqq.quantize(normal(64, 48), Int2())
    assert chosen(normal(8, 64), q) == "rough"
    assert chosen(normal(8, 64), q, precision="highest") == "high"
    assert chosen(normal(3, 64), q) == "low"
    assert chosen(normal(3, 64), eqq.quantize(normal(64, 48), "nf4")) == "any"
    assert chosen(normal(3, 64), q, kernel="reference") == "reference"
    rounded = eqq.quantize(normal(64, 48), Int2(), activation="int8")
    assert chosen(normal(3, 64), rounded) == "rounded"
    other = eqq.quantize(normal(64, 48), Int2(), activation="nf4")
    assert chosen(normal(3, 64), other) == "reference"


def test_ambiguity_is_an_error():
    eqq.register_kernel("matmul", Int2)(dense_rows)
    eqq.register_kernel("matmul", Int2, priority=1)(dense_rows)
    eqq.register_kernel("matmul_transposed", Int2)(dense_rows)
    with pytest.raises(ValueError, match="dense_rows.*ambiguous.*Pass another"):
        eqq.register_kernel("matmul", Int2)(dense_rows)


# A kernel counts for programs, too, that were compiled before it came.
def test_registering_late():
    q, x = eqq.quantize(normal(64, 48), Int2()), normal(8, 64)
    product = jax.jit(lambda x, q: x @ q)
    before = product(x, q)

    @eqq.register_kernel("matmul", Int2)
    def twice(x, stored, problem):
        return 2 * dense_rows(x, stored, problem)

    assert jnp.allclose(product(x, q), 2 * before, rtol=1e-4, atol=1e-4)
    assert jnp.allclose(x @ q, 2 * before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "args,message",
    (
        (("dot", Int2), "product"),
        (("matmul", Int2, "abacus"), "platform"),
        (("matmul", Int2()), "format_type"),
        (("matmul", Int2, "cpu", "int8"), "activation"),
        (("matmul", Int2, "cpu", None, "first"), "`priority` should be a number"),
    ),
)
def test_bad_arguments(args, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        eqq.register_kernel(*args)
