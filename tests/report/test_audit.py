import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqquant as eqq

from ..helpers import normal


def uses(audit):
    return [(use.paths, use.kind, use.how) for use in audit.uses]


def test_model():
    model = eqq.tree_quantize(eqx.nn.MLP(64, 32, 128, depth=1, key=jr.key(0)), "nf4")
    x = normal(5, 64)
    found = eqq.audit(jax.vmap(model), x)
    paths = ["layers.0.weight", "layers.1.weight"]
    assert [operand.path for operand in found.operands] == paths
    first, second = (layer.weight.T for layer in model.layers)
    kernels = eqq.explain(x, first).kernel, eqq.explain(normal(5, 128), second).kernel
    assert uses(found) == [((p,), "product", k) for p, k in zip(paths, kernels)]
    assert [use.problem.rows for use in found.uses] == [5, 5]
    assert found.operands[0].nbytes == model.layers[0].weight.nbytes
    assert found.dequantized == []
    text = repr(found)
    assert "layers.1.weight" in text and f"product of 5 rows by `{kernels[0]}`" in text


def test_arguments():
    q = eqq.quantize(normal(64, 32), "int8")
    closed = eqq.quantize(normal(32, 32), "int8")
    fn = lambda x, tree, *, unused: (x @ tree["w"]) @ closed
    found = eqq.audit(fn, normal(3, 64), {"w": q}, unused=q)
    assert [use.paths for use in found.uses] == [
        ("args.1.w", "kwargs.unused"),
        ("closed over",),
    ]
    unused = eqq.quantize(normal(8, 16), "int8")
    found = eqq.audit(fn, normal(3, 64), {"w": q}, unused=unused)
    assert [operand.path for operand in found.operands] == ["args.1.w", "kwargs.unused"]
    assert "is not used" in repr(found) and "closed over" in repr(found)


def test_gradient_and_scan():
    layers = [eqq.quantize(normal(48, 48, seed=i), "int8") for i in range(3)]
    stack = jax.tree_util.tree_map(lambda *a: jnp.stack(a), *layers)

    def loss(x, stack):
        y, _ = jax.lax.scan(lambda x, q: (jnp.tanh(x @ q), None), x, stack)
        return jnp.sum(y)

    found = eqq.audit(jax.grad(loss), normal(4, 48), stack)
    assert [use.times for use in found.uses] == [3, 3]
    assert [use.problem.product for use in found.uses] == [
        "matmul",
        "matmul_transposed",
    ]
    assert all(use.paths == ("args.1",) for use in found.uses)


def test_dequantization():
    q = eqq.quantize(normal(64, 32), "ternary")
    found = eqq.audit(lambda q: (q + 1.0, q.dequantize()), q)
    assert uses(found) == [
        (("args.0",), "dequantize", "add"),
        (("args.0",), "dequantize", ""),
    ]
    assert found.uses[0].nbytes == 64 * 32 * 4
    assert found.uses[0].source.split(":")[0] == __file__
    found = eqq.audit(eqq.implicit(lambda q: jnp.sort(jnp.sin(q))), q)
    assert uses(found) == [(("args.0",), "dequantize", "sin")]
    assert "dequantized for `sin`" in repr(found)


def test_rows():
    q = eqq.quantize(normal(64, 32), "int8", axis=-1)
    found = eqq.audit(lambda q, i: q[i], q, jnp.arange(5))
    assert uses(found) == [(("args.0",), "rows", "")]
    assert found.uses[0].nbytes == 5 * 32 * 4


def test_convolution():
    conv = eqx.nn.Conv2d(64, 64, 3, key=jr.key(0))
    model = eqq.tree_quantize(conv, "int8", unsupported="on_call")
    found = eqq.audit(model, normal(64, 8, 8))
    assert uses(found) == [(("weight",), "product", "qconv")]


@pytest.mark.parametrize("m", (1, 40))
def test_dtypes_of_products(m):
    q = eqq.quantize(normal(512, 768), "int8", activation="int8")
    found = eqq.audit(lambda x, q: x @ q, normal(m, 512), q)
    kernel = eqq.explain(normal(m, 512), q).kernel
    assert ("s8 x s8 -> s32" in found.product_dtypes) == (kernel == "integer_tiles")
    w = normal(512, 64).astype(jnp.bfloat16)
    found = eqq.audit(lambda x, w: x @ w, normal(40, 512).astype(jnp.bfloat16), w)
    # (Before JAX 0.11, XLA has no such product on a CPU: it widens both.)
    dtype = "bf16" if jax.__version_info__ >= (0, 11) else "f32"
    assert list(found.product_dtypes) == [f"{dtype} x {dtype} -> {dtype}"]
    assert found.temporary_bytes is not None


def test_structs():
    q = eqq.quantize(normal(64, 32), "int8")
    x = jax.ShapeDtypeStruct((7, 64), jnp.float32)
    assert eqq.audit(lambda x, q: x @ q, x, q).uses[0].problem.rows == 7


def test_a_model_in_a_wrapper_is_told_of_once():
    model = eqq.tree_quantize(eqx.nn.Linear(64, 32, key=jr.key(0)), "int8")
    mapped = [eqx.filter_vmap(model), jax.jit(jax.vmap(model))]
    for fn, x in [(fn, normal(3, 64)) for fn in mapped] + [
        (eqq.implicit(model), normal(64))
    ]:
        found = eqq.audit(fn, x)
        assert [operand.path for operand in found.operands] == ["weight"]
        assert [use.paths for use in found.uses] == [("weight",)]


def paths(fn, *args):
    return [use.paths for use in eqq.audit(eqq.implicit(fn), *args).uses]


def test_paths_through_functions_and_loops():
    a, b = (eqq.quantize(normal(16, 16, seed=i), "int8") for i in range(2))
    x = normal(4, 16)
    swapped = jax.jit(lambda a, b: (b, a))
    assert paths(lambda x, a, b: x @ swapped(a, b)[0], x, a, b) == [("args.2",)]

    def either(x, a, b):
        return jax.lax.while_loop(lambda x: jnp.sum(x @ a) > 1, lambda x: x @ b, x)

    assert paths(either, x, a, b) == [("args.1",), ("args.2",)]

    def in_turn(x, a, b):
        turn = lambda _, c: (c[0] @ c[1], c[2], c[1])
        return jax.lax.fori_loop(0, 3, turn, (x, a, b))[0]

    assert paths(in_turn, x, a, b) == [("args.1", "args.2")]


def test_the_input_of_a_convolution_is_not_its_filter():
    q = eqq.quantize(normal(16, 16), "int8")
    filter = eqq.quantize(normal(4, 2, 3), "int8", axis=(1, 2))
    x = normal(2, 16)
    product = jax.jit(lambda x, q: x @ q)
    fn = lambda x, q, filter: eqq.qconv(product(x, q)[None], filter, (1,), "SAME")
    found = [use.paths for use in eqq.audit(fn, x, q, filter).uses]
    assert found == [("args.1",), ("args.2",)]
    # Nor is one that the function closes over.
    found = eqq.audit(lambda filter: eqq.qconv(x[None], filter, (1,), "SAME"), filter)
    assert [use.paths for use in found.uses] == [("args.0",)]
