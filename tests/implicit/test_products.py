import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import eqquant as eqq
from eqquant import implicit, qdot_general, qeinsum

from ..helpers import error, formats, normal
from .same import assert_close, assert_same, assert_same_gradient


# How each axis of the weight is used: batched over, contracted, or neither.
@st.composite
def products(draw):
    ndim = draw(st.integers(1, 4))
    sizes = draw(st.permutations([2, 3, 4, 18]))[:ndim]
    uses = draw(st.lists(st.sampled_from("bcf"), min_size=ndim, max_size=ndim))
    count = draw(st.integers(1, min(2, ndim)))
    axis = tuple(sorted(draw(st.permutations(range(ndim)))[:count]))
    batch = draw(st.permutations([i for i in range(ndim) if uses[i] == "b"]))
    contracted = draw(st.permutations([i for i in range(ndim) if uses[i] == "c"]))
    free = draw(st.sampled_from([(), (5,), (5, 6)]))
    x_axes = draw(st.permutations([*batch, *contracted, *[-n for n in free]]))
    shape = [sizes[i] if i >= 0 else -i for i in x_axes]
    numbers = (
        (tuple(x_axes.index(i) for i in contracted), tuple(contracted)),
        (tuple(x_axes.index(i) for i in batch), tuple(batch)),
    )
    return tuple(sizes), axis, tuple(shape), numbers, draw(st.booleans())


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int4-affine", "ternary-tensor"))
@settings(max_examples=5)
@given(case=products())
def test_dimension_numbers(name, case):
    shape, axis, x_shape, numbers, q_first = case
    q = eqq.quantize(normal(*shape), formats[name], axis=axis)
    x = normal(*x_shape, seed=1)
    (a, b), (c, d) = numbers
    if q_first:
        fn = lambda x, w: lax.dot_general(w, x, ((b, a), (d, c)))
    else:
        fn = lambda x, w: lax.dot_general(x, w, numbers)
    # Whatever contracts all of the axes of blocks and leaves rows, or none of them and
    # others, needs no dequantizing.
    along = [i in b for i in axis]
    others = [i for i in range(len(shape)) if i not in axis]
    free = [i for i in others if i not in (*b, *d)]
    summed = [i for i in others if i in b]
    packed = not any(i in d for i in axis) and (
        (all(along) and bool(free or not summed)) or (not any(along) and bool(summed))
    )
    assert_same(fn, x, q, packed=packed, read=int(packed))


@pytest.mark.parametrize(
    "dtype, preferred, weight",
    (
        (jnp.bfloat16, jnp.float32, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, None, jnp.float32),
        (jnp.int8, jnp.float32, jnp.float32),
        (jnp.float16, jnp.float32, jnp.float16),
    ),
)
def test_dtypes(dtype, preferred, weight):
    q = eqq.quantize(normal(64, 48), "int8").astype(weight)
    x = (5 * normal(3, 64, seed=1)).astype(dtype)

    def fn(x, w):
        return lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=preferred
        )

    tolerance = 2e-2 if weight == jnp.bfloat16 else 2e-3
    assert_same(fn, x, q, packed=True, read=1, tolerance=tolerance)


def test_precision_is_passed_on():
    q = eqq.quantize(normal(64, 48), "int8")
    names = []
    x = normal(3, 64, seed=1)
    for precision in (None, "highest", lax.Precision.HIGH, ("default", "highest")):
        fn = implicit(lambda x, w, p=precision: jnp.matmul(x, w, precision=p))
        (eqn,) = [
            eqn
            for eqn in jax.make_jaxpr(fn)(x, q).jaxpr.eqns
            if eqn.primitive.name == "qmatmul"
        ]
        names.append(eqn.params["precision"])
    assert names == [None, "highest", "high", "highest"]


# The larger one stays packed.
@pytest.mark.examples(2)
@pytest.mark.parametrize("axes", [*it.product((-1, -2), (-1, -2))])
def test_both_quantized(axes):
    a = eqq.quantize(normal(16, 64), "nf4", axis=axes[0])
    b = eqq.quantize(normal(64, 48, seed=1), "int8", axis=axes[1])
    assert_same(lambda a, b: (a @ b, b.T @ a.T, a @ a.T), a, b, read=3)


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    "subscripts, shape, axis, x_shape",
    (
        ("bk,nk->bn", (48, 64), -1, (5, 64)),
        ("tk,ekn->ten", (3, 64, 48), -2, (5, 64)),
        ("td,dhe->the", (64, 4, 12), 0, (5, 64)),
        ("the,hed->td", (4, 12, 64), (0, 1), (5, 4, 12)),
        ("the,hed->td", (4, 12, 64), 1, (5, 4, 12)),
        ("btd,sdhe->sbthe", (3, 64, 4, 12), 1, (2, 5, 64)),
        ("...k,kn->...n", (64, 48), -2, (2, 5, 64)),
    ),
)
def test_einsum(subscripts, shape, axis, x_shape):
    q = eqq.quantize(normal(*shape), "int8", axis=axis)
    x = normal(*x_shape, seed=1)
    fn = lambda x, w: jnp.einsum(subscripts, x, w)
    assert_same(fn, x, q, packed=True, read=1)
    assert_same_gradient(fn, x, q)


def test_q_functions():
    w, x = normal(64, 48), normal(5, 64, seed=1)
    q = eqq.quantize(w, "int8")
    numbers = (((1,), (0,)), ((), ()))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        y = qdot_general(x.astype(dtype), q, numbers)
        assert_close(y, x.astype(dtype) @ q)
        assert_close(qeinsum("bi,io->bo", x.astype(dtype), q), y)
    assert_close(qdot_general(q, x, (((0,), (1,)), ((), ()))), (x @ q).T)
    assert_close(qdot_general(x, w, numbers), x @ w)
    assert_close(qeinsum("bi,io->bo", x, w), x @ w)
    assert_close(qeinsum("io->oi", q), q.dequantize().T)
    three = qeinsum("bi,io,po->bp", x, q, eqq.quantize(normal(7, 48), "nf4", axis=-1))
    assert three.shape == (5, 7)
    narrow = x.astype(jnp.bfloat16)
    wide = qdot_general(narrow, q, numbers, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    # Not rounded on the way.
    assert error(wide, np.asarray(narrow, np.float64), q.dequantize()) < 1e-5
    with pytest.raises(TypeError, match="contract"):
        qdot_general(x, q, (((0,), (0,)), ((), ())))
