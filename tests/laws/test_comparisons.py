import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import lora, tree_fake_quantize

from ..helpers import formats, normal


w = normal(64, 48)
tree = {"w": jnp.asarray(w)}
stand_ins = {
    "nf4": lambda: eqq.quantize(w, formats["nf4"]),
    "int8": lambda: eqq.quantize(w, formats["int8"]),
    "nested": lambda: eqq.quantize(w, formats["nested"]),
    "stack": lambda: eqq.quantize(normal(2, 64, 48), "int4"),
    "transposed": lambda: eqq.quantize(w, "int8").mT,
    "bfloat16": lambda: eqq.quantize(w.astype(jnp.bfloat16), "nf4"),
    "lora": lambda: lora(tree, 4, key=jr.key(0))[0]["w"],
    "fake": lambda: tree_fake_quantize(tree, format="nf4", min_size=1)["w"],
}
all_stand_ins = pytest.mark.parametrize("name", stand_ins)
comparisons = (
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)


# Whatever stands for an array is compared with others as that array is.
@pytest.mark.examples(1)
@all_stand_ins
def test_comparisons(name):
    q = stand_ins[name]()
    dense = np.array(q.dequantize())
    array = jnp.asarray(np.concatenate([np.ones_like(dense[:1]), dense[1:]]))
    numbers = (0, 0.5, np.float32(0))
    arrays = (
        array,
        np.asarray(array),
        array[:1],
        jnp.asarray(np.asarray(0.5, array.dtype)),
    )
    if name == "bfloat16":
        numbers = (0, 0.5)
    for op in comparisons:
        for other in (*numbers, *arrays):
            wide = np.asarray(other)
            for found, expected in (
                (op(q, other), op(dense, wide)),
                (op(other, q), op(wide, dense)),
            ):
                assert isinstance(found, jax.Array) and found.dtype == bool
                np.testing.assert_array_equal(found, expected)
    every = lambda q, x: [both for op in comparisons for both in (op(q, x), op(x, q))]
    wanted = every(dense, np.asarray(array))
    for found, expected in zip(eqx.filter_jit(every)(q, array), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@ft.partial(jax.jit, static_argnums=1)
def _again(q, step):
    return jtu.tree_map(lambda a: a + jnp.asarray(step, a.dtype), q)


# Two of them are the same, or are not; and what is no array is another thing.
@all_stand_ins
def test_what_stays(name):
    q = stand_ins[name]()
    again, other = _again(q, 0), _again(q, 1)
    for x, same in ((q, True), (again, True), (other, False)):
        assert bool(q == x) is same
        assert bool(q != x) is not same
    another = stand_ins["int8" if name != "int8" else "nf4"]()
    assert not (q == another) and (q != another)
    for x in (None, "nf4", [1, 2], (), object(), eqq.NF4()):
        assert (q == x) is (x == q) is False
        assert (q != x) is (x != q) is True
    assert q in [None, "nf4", q] and q not in [None, "nf4", other]
    treedef = jtu.tree_structure(q)
    assert hash(treedef) == hash(jtu.tree_structure(again)) and treedef == treedef


def test_of_shapes_that_do_not_fit():
    q = stand_ins["nf4"]()
    for op in comparisons:
        with pytest.raises((TypeError, ValueError)):
            op(q, jnp.ones((3, 5)))
