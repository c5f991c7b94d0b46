"""What holds for formats that can be decoded, but not encoded: for random blocks."""

import gguf
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqquant as eqq
import eqquant.kernels._table as table
import eqquant.kernels.native._library as library
from eqquant import interop

from ..helpers import error, normal, trees_equal


formats = {
    type(format).__name__: format
    for format in (
        *(eqq.formats.IQ1_M(), eqq.formats.IQ1_S()),
        *(eqq.formats.IQ2_S(), eqq.formats.IQ2_XS(), eqq.formats.IQ2_XXS()),
        *(eqq.formats.IQ3_S(), eqq.formats.IQ3_XXS()),
    )
}
every = pytest.mark.parametrize("name", formats)
n, k = 80, 512


def random_blocks(format, seed):
    rng = np.random.default_rng(seed)
    shape = (n, k // format.block_size, format.type_size)
    blocks = rng.integers(0, 256, shape, np.uint8)
    # The upper byte of the scale, in float16: of about 0.01, and of either sign.
    if isinstance(format, eqq.formats.IQ1_M):
        blocks[..., 55] = blocks[..., 55] & 0x8F | 0x20
    else:
        blocks[..., 1] = blocks[..., 1] & 0x83 | 0x20
    return blocks.reshape(n, -1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """For each format two weights, from a file, and what `gguf` decodes."""
    path = tmp_path_factory.mktemp("read") / "a.gguf"
    writer, dense = gguf.GGUFWriter(path, "test"), {}
    for name, format in formats.items():
        kind = gguf.GGMLQuantizationType[name]
        for i in range(2):
            blocks = random_blocks(format, i)
            writer.add_tensor(f"{name}.{i}", blocks, raw_dtype=kind)
            dense[f"{name}.{i}"] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = interop.open(path)
    found = {}
    for name in formats:
        keys = [f"{name}.{i}" for i in range(2)]
        found[name] = [(checkpoint[key], dense[key]) for key in keys]
    return found


@pytest.mark.examples(1)
@every
def test_decoding(name, weights):
    q, dense = weights[name][0]
    format = formats[name]
    assert q.shape == (n, k) and q.format == format == eqq.formats.as_format(name)
    assert q.nbytes == n * k // 256 * format.type_size
    assert q.bits_per_weight == format.bits
    assert f"{format}" == f"{name}()" and f"{name}()" in f"{q}"
    assert f"{name}()" in f"{eqq.report({'w': q})}"
    np.testing.assert_array_equal(q.dequantize(), dense)
    np.testing.assert_array_equal(q.T.dequantize(), dense.T)
    np.testing.assert_array_equal(q[np.array([3, 70])], dense[[3, 70]])
    # A kernel that knows its `base` alone multiplies the same numbers.
    flat = jax.jit(lambda q: format.flat(q.layout.to_rows(q.stored), 0))(q)
    decode = jax.jit(format.base.decode, static_argnums=1)
    np.testing.assert_array_equal(decode(flat, 0), dense)


@pytest.mark.examples(1)
@every
def test_products(name, weights):
    q, dense = weights[name][0]
    for m in (1, 3, 20, 40):
        for w, expected in ((q, dense), (q.T, dense.T)):
            x = normal(m, w.shape[0], seed=m)
            problem = eqq.explain(x, w).problem
            if library.missing() is None:
                assert table.choose(problem).kernel.name.startswith("native_decoded")
            for kernel in table.supporting(problem):
                y = eqq.qmatmul(x, w, kernel=kernel.name)
                assert error(y, x, expected) < kernel.bound(problem), kernel.name
            y = eqq.qmatmul(x, w, kernel="reference")
            assert error(y, x, expected) < 1e-6


@pytest.mark.examples(2)
@every
def test_transforms(name, weights):
    (q, dense), (other, other_dense) = weights[name]
    x = normal(3, n)
    loss = lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2)
    value, found = jax.jit(jax.value_and_grad(loss))(x, q)
    expected_value, expected = jax.value_and_grad(loss)(x, jnp.asarray(dense))
    np.testing.assert_allclose(value, expected_value, rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    # Stacked, as the layers of a scanned model or its experts are.
    stack = jtu.tree_map(lambda *a: jnp.stack(a), q, other)
    assert stack.shape == (2, n, k)
    both = np.stack([dense, other_dense])
    np.testing.assert_array_equal(stack.dequantize(), both)
    y = jax.jit(jax.vmap(lambda q: x @ q))(stack)
    z = jax.lax.scan(lambda total, q: (total, x @ q), 0, stack)[1]
    for i, expected in enumerate(both):
        assert error(y[i], x, expected) < 1e-5 > error(z[i], x, expected)
    assert trees_equal(stack[1].stored, other.stored)


@pytest.mark.examples(2)
@every
def test_sharded(name, weights):
    q, dense = weights[name][0]
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x = normal(3, n)
    for spec in (PartitionSpec("d", None), PartitionSpec(None, "d")):
        placed = q.with_sharding(NamedSharding(mesh, spec))
        assert placed.is_sharded
        np.testing.assert_array_equal(placed.dequantize(), dense)
        y = jax.jit(lambda x, q: x @ q)(x, placed)
        assert error(y, x, dense) < 1e-5
    four = Mesh(np.array(jax.devices()[:4]), ("d",))
    with pytest.raises(ValueError, match="would cut through a block"):
        q.with_sharding(NamedSharding(four, PartitionSpec(None, "d")))


def test_save(weights, tmp_path):
    tree = {name: q for name, ((q, _), _) in weights.items()}
    path = tmp_path / "a.safetensors"
    eqq.save(path, tree)
    assert trees_equal(eqq.load(path), tree)
    assert trees_equal(eqq.load(path, like=tree), tree)
    dense = {name: q.dequantize() for name, q in tree.items()}
    assert trees_equal(eqq.tree_dequantize(eqq.load(path, like=dense)), dense)
    again = interop.open(path)
    assert trees_equal(dict(again), tree)
    assert [e.struct().shape for e in again.entries.values()] == [(n, k)] * len(tree)
