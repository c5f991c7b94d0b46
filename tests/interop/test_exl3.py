"""Files of exllamav3. No real file is at hand: these are of random codes, and checked
against another decoder, which follows what is said of the layout bit by bit."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqquant as eqq
import eqquant.kernels._table as table
from eqquant import interop
from eqquant.formats import EXL3
from eqquant.interop import Join, Split

from ..helpers import error, normal, trees_equal
from . import exl3, files


name = "model.layers.0.mlp.up_proj"
_every = [(bits, code) for code in ("3inst", "mcg", "mul1") for bits in (1, 2, 3, 4)]
_every += [(5, "3inst"), (6, "mcg"), (7, "mul1"), (8, "mul1")]
_every += [(bits + 0.5, "mul1") for bits in range(1, 8)]


def opened(path, made):
    """The array of a file, in float32, and the matrix."""
    tensors, config, expected = made
    files.save(path, tensors, config)
    ((key, w),) = expected.items()
    with interop.open(path) as checkpoint:
        return checkpoint[key].astype(jnp.float32), w.astype(np.float32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("exl3") / "model.safetensors"
    return [opened(path, exl3.made(256, 256, 2.5, seed=i)) for i in range(2)]


@pytest.mark.examples(3)
@pytest.mark.parametrize("signs", (False, True))
@pytest.mark.parametrize("bits, code", _every[::-1])
def test_decoding(bits, code, signs, path):
    tensors, config, expected = made = exl3.made(bits=bits, code=code, signs=signs)
    q, w = opened(path, made)
    assert q.format == EXL3(bits, code) and q.axis == -1 and q.shape == (128, 256)
    assert q.nbytes == 128 * 256 * bits / 8 + 2 * (128 + 256)
    # The numbers before the rotations are the same, and after them nearly.
    numbers = jax.jit(q.format.tiles.decode, static_argnums=1)(q.stored, 0)
    inner = exl3.inner(tensors[f"{name}.trellis"], bits, code)
    np.testing.assert_array_equal(numbers, inner.T)
    np.testing.assert_allclose(q.dequantize(), w, rtol=0, atol=1e-6 * np.abs(w).max())
    checkpoint = interop.read_exl3(path)
    assert list(checkpoint) == list(expected) and checkpoint.kind == "exl3"
    entry = checkpoint.entries[f"{name}.weight"]
    assert (entry.shape, entry.format) == (q.shape, q.format)
    assert entry.dtype == jnp.float16 and entry.struct().shape == q.shape


# exllamav3's sources have one measured property of a code: the standard deviation of
# 3inst (`codebook_scale`).
@pytest.mark.parametrize("code, std", [("3inst", 1.24371088), ("mul1", 1.0)])
def test_all_numbers(code, std):
    numbers = np.array([exl3.number(state, code) for state in range(2**16)])
    assert abs(np.std(numbers) - std) < (1e-7 if code == "3inst" else 1e-3)
    # In a tile of 8 bits, each two bytes are a state.
    words = np.arange(2**16, dtype=np.uint16)
    stored = {"codes": np.repeat(words, 2).view(np.uint8).reshape(16, -1)}
    found = jax.jit(EXL3(8, code).tiles.decode, static_argnums=1)(stored, 0)
    assert set(numbers) == set(np.asarray(found).ravel().tolist())


@pytest.mark.examples(2)
@pytest.mark.parametrize("bits, code", [(3, "3inst"), (4, "mcg"), (2.5, "mul1")])
def test_written_again(bits, code, tmp_path):
    tensors, config, _ = exl3.made(bits=bits, code=code)
    tensors[f"{name}.bias"] = np.arange(128, dtype=np.float16)
    files.save(tmp_path / "a.safetensors", tensors, config)
    with interop.open(tmp_path / "a.safetensors") as checkpoint:
        interop.write_exl3(tmp_path / "model", checkpoint)
        # And once it was loaded, and transposed.
        arrays = dict(checkpoint)
    arrays[f"{name}.weight"] = arrays[f"{name}.weight"].T.T
    interop.write(tmp_path / "b.safetensors", arrays, "exl3")
    for path in (tmp_path / "model/model.safetensors", tmp_path / "b.safetensors"):
        again, _ = files.load(path)
        assert again.keys() == tensors.keys()
        for key, x in tensors.items():
            assert (again[key].dtype, again[key].shape) == (x.dtype, x.shape)
            assert again[key].tobytes() == x.tobytes()
    config = interop.open(tmp_path / "model").config["quantization_config"]
    assert config == {"quant_method": "exl3", "bits": bits, "head_bits": bits}


# As of a whole model: some arrays are not quantized, and the head has more bits.
def test_model(tmp_path):
    tensors, (config, *_) = {}, [exl3.made()[1]]
    for i, (last, bits, code) in enumerate(
        [("q_proj", 2, "mul1"), ("o_proj", 3, "mul1"), ("lm_head", 6, "3inst")]
    ):
        where = "lm_head" if last == "lm_head" else f"model.layers.0.self_attn.{last}"
        tensors |= exl3.made(128, 128, bits, code, seed=i, name=where)[0]
    dense = {
        "model.embed_tokens.weight": np.ones((128, 128), np.float16),
        "model.layers.0.input_layernorm.weight": np.ones(128, np.float16),
        "model.layers.0.self_attn.q_norm.weight": np.ones(64, np.float16),
        "lm_head.bias": np.ones(128, np.float16),
    }
    files.save(tmp_path / "model.safetensors", tensors | dense, config)
    (tmp_path / "quantization_config.json").write_text('{"tensor_storage": {}}')
    with interop.open(tmp_path) as checkpoint:
        formats = {key: e.format for key, e in checkpoint.entries.items()}
        assert all(e.problem is None for e in checkpoint.entries.values())
        assert formats == dict.fromkeys(dense) | {
            "model.layers.0.self_attn.q_proj.weight": EXL3(2),
            "model.layers.0.self_attn.o_proj.weight": EXL3(3),
            "lm_head.weight": EXL3(6, "3inst"),
        }
        interop.write(tmp_path / "again", checkpoint, "exl3")
    with interop.open(tmp_path / "again") as again:
        assert {key: e.format for key, e in again.entries.items()} == formats
        section = again.config["quantization_config"]
    assert section == {"quant_method": "exl3", "bits": 2.5, "head_bits": 6}


# Older files have signs alone: they are written as scales of 1 and -1.
def test_signs_are_written_as_scales(path):
    tensors, config, _ = exl3.made(signs=True)
    files.save(path, tensors, config)
    with interop.open(path) as checkpoint:
        interop.write(path.with_name("b.safetensors"), checkpoint, "exl3")
    again, _ = files.load(path.with_name("b.safetensors"))
    for axis in "uv":
        of_signs = exl3.of_signs(tensors[f"{name}.s{axis}"])
        np.testing.assert_array_equal(again[f"{name}.s{axis}h"], of_signs)


@pytest.mark.parametrize("other", ["int4", "nf4"])
def test_other_formats_are_not_written(other, path):
    w = eqq.quantize(normal(128, 128), other, axis=-1)
    with pytest.raises(ValueError, match=r"has `EXL3\(bits, code\)` alone"):
        interop.write(path, {"a.weight": w}, "exl3")


def test_load_into(path):
    tensors, config, expected = exl3.made()
    bias = normal(128)
    tensors[f"{name}.bias"] = np.asarray(bias, np.float16)
    files.save(path, tensors, config)
    model = eqx.filter_eval_shape(eqx.nn.Linear, 256, 128, key=jr.key(0))
    with interop.open(path) as checkpoint:
        model = interop.load_into(model, checkpoint, {f"{name}.*": "*"})
    assert model.weight.format == EXL3(3) and model.weight.dtype == jnp.float32
    x = normal(5, 256)
    w = expected[f"{name}.weight"]
    y = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(model, x)
    np.testing.assert_allclose(y - bias[None], x @ w.T, rtol=1e-3, atol=1e-3)
    assert "EXL3()" in f"{eqq.report(model)}"


@pytest.mark.examples(1)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_products(weights, dtype):
    q, dense = weights[0]
    for m in (1, 3, 40):
        for w, expected in ((q, dense), (q.T, dense.T)):
            x = normal(m, 256, seed=m, dtype=dtype)
            bound = 1e-5 + float(jnp.finfo(dtype).eps) / 2
            problem = eqq.explain(x, w).problem
            assert problem is not None
            for kernel in table.supporting(problem):
                y = eqq.qmatmul(x, w, kernel=kernel.name)
                assert y.dtype == dtype
                assert error(y, x, expected) < bound, kernel.name
            assert error((w.T @ x[0])[None], x[:1], expected) < bound
    assert "is scaled and rotated" in f"{eqq.explain(x, q)}"


def test_transforms(weights):
    (q, dense), (other, other_dense) = weights
    x = normal(3, 256)
    loss = lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2)
    value, found = jax.jit(jax.value_and_grad(loss))(x, q)
    expected_value, expected = jax.value_and_grad(loss)(x, jnp.asarray(dense))
    np.testing.assert_allclose(value, expected_value, rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    # Stacked, as the layers of a scanned model or its experts are.
    stack = jtu.tree_map(lambda *a: jnp.stack(a), q, other)
    both = np.stack([dense, other_dense])
    assert stack.shape == both.shape
    np.testing.assert_array_equal(stack[1].dequantize(), other.dequantize())
    y = jax.jit(jax.vmap(lambda q: x @ q))(stack)
    z = jax.lax.scan(lambda total, q: (total, x @ q), 0, stack)[1]
    several = jnp.stack([x, -x])
    each = several @ stack.mT
    named = eqq.qeinsum("bmi,boi->bmo", several, stack)
    for i, expected in enumerate(both):
        assert error(y[i], x, expected) < 1e-5 > error(z[i], x, expected)
        assert error(each[i], several[i], expected.T) < 1e-5
        assert error(named[i], several[i], expected.T) < 1e-5
    assert trees_equal(stack[1].stored, other.stored)


# Rows are not taken from their groups: such arrays are decoded, or there is an error.
def test_rows_are_together(weights):
    q, dense = weights[0]
    dense, x = q.dequantize(), normal(3, 256)
    np.testing.assert_array_equal(q[jnp.array([3, 200])], dense[jnp.array([3, 200])])
    np.testing.assert_array_equal(q[128:], dense[128:])
    parts = eqq.implicit(lambda w: (w[5:9], w[::2], jnp.concatenate([w, w]), w[::-1]))
    for found, expected in zip(parts(q), parts(dense), strict=True):
        found = found.dequantize() if eqq.is_quantized(found) else found
        np.testing.assert_array_equal(found, expected)
    stack = jtu.tree_map(lambda *a: jnp.stack(a), *[q] * 256)
    swapped = eqq.implicit(lambda w: jnp.swapaxes(w, 0, 1))(stack)
    np.testing.assert_array_equal(swapped[:, 3], dense)
    flat = eqq.implicit(lambda w: (jnp.reshape(w, (-1, 256)), w[None]))(stack[:2])
    np.testing.assert_array_equal(flat[0], jnp.concatenate([dense, dense]))
    assert eqq.is_quantized(flat[1]) and flat[1].shape == (1, 2, 256, 256)
    several = eqq.implicit(lambda w: jnp.broadcast_to(w, (3, *w.shape)))(q)
    assert eqq.is_quantized(several)
    np.testing.assert_array_equal(several[2].dequantize(), dense)
    total = eqq.qeinsum("mi,eoi->mo", x, stack[:2])
    np.testing.assert_allclose(total, 2 * x @ dense.T, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="inconsistent sizes"):
        jax.vmap(lambda row: row @ x[0])(q)
    cut = jtu.tree_map(lambda a: a[:64], q)
    with pytest.raises(ValueError, match="stores 128 rows and columns .* together"):
        cut.dequantize()


def test_joined_and_split(weights, path):
    (q, dense), (other, _) = weights
    struct = lambda n: jax.ShapeDtypeStruct((n, 256), jnp.float32)
    halves = {"a": struct(128), "b": struct(128)}
    parts = interop.load_into(halves, {"w": q}, {"w": Split("a", "b")})
    assert all(part.format == q.format for part in parts.values())
    whole = jnp.concatenate([part.dequantize() for part in parts.values()])
    np.testing.assert_array_equal(whole, q.dequantize())
    again = interop.load_into({"w": struct(256)}, parts, {Join("a", "b"): "w"})
    assert trees_equal(again["w"], q)
    thirds = {"a": struct(64), "b": struct(192)}
    with pytest.raises(ValueError, match="stores 128 rows together, which do not"):
        interop.load_into(thirds, {"w": q}, {"w": Split("a", "b")})
    with pytest.raises(ValueError, match="one 'suh' for all of its rows"):
        both = {"a": q, "b": other}
        interop.load_into({"w": struct(512)}, both, {Join("a", "b"): "w"})


@pytest.mark.examples(1)
@pytest.mark.parametrize("spec", [("d", None), (None, "d")])
def test_sharded(weights, spec):
    q, dense = weights[0]
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    placed = q.with_sharding(NamedSharding(mesh, PartitionSpec(*spec)))
    assert placed.is_sharded and placed.placement.spec == PartitionSpec(*spec)
    np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
    x = normal(3, 256)
    product = jax.jit(lambda x, q: (x @ q, x @ q.T))
    for y, w in zip(product(x, placed), (dense, dense.T), strict=True):
        assert error(y, x, w) < 1e-5
    four = Mesh(np.array(jax.devices()[:4]), ("d",))
    with pytest.raises(ValueError, match="would cut through a (block|group of 128)"):
        q.with_sharding(NamedSharding(four, PartitionSpec(*spec)))


@pytest.mark.examples(1)
@pytest.mark.parametrize("spec", [("d", None), (None, "d")])
def test_explicit_mesh(weights, spec):
    q, dense = weights[0]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    x = normal(4, 256)
    with jax.set_mesh(mesh):
        placed = q.with_sharding(NamedSharding(mesh, PartitionSpec(*spec)))
        stack = jtu.tree_map(lambda *a: jnp.stack(a), placed, placed)
        np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
        for inputs in (("d", None), (None, "d")):
            split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*inputs)))
            for w, expected in ((placed, dense), (placed.T, dense.T)):
                assert error(split @ w, x, expected) < 1e-5
            assert error((split @ stack)[1], x, dense) < 1e-5


def test_save(weights, tmp_path):
    tree = [q for q, _ in weights]
    path = tmp_path / "a.safetensors"
    eqq.save(path, tree)
    assert trees_equal(eqq.load(path, like=tree), tree)
    dense = [q.dequantize() for q in tree]
    assert trees_equal(eqq.load(path, like=dense), tree)


def test_not_encoded():
    with pytest.raises(ValueError, match=r"Nothing can be quantized in EXL3\(\)"):
        eqq.quantize(normal(128, 128), "exl3", axis=-1)


def _without(*parts):
    return lambda x: {k: v for k, v in x.items() if k.split(".")[-1] not in parts}


def _with(**parts):
    return lambda x: x | {f"{name}.{key}": part for key, part in parts.items()}


_marker = np.int32(0x1234)


@pytest.mark.parametrize(
    "change, text",
    [
        (_without("suh"), "a part of a quantized array"),
        (_without("svh"), "a part of a quantized array"),
        (_without("trellis"), "a part of a quantized array"),
        (_with(suh=np.ones(128, np.float16)), "should have a sign for each input"),
        (_with(svh=np.ones(256, np.float16)), "should have a sign for each input"),
        (
            _with(trellis=np.zeros((8, 128, 48), np.int16)),
            "should have a sign for each input and output, and 16 of both in each tile",
        ),
        (
            _with(trellis=np.zeros((15, 8, 48), np.int16), suh=np.ones(240, "f2")),
            "of which there are a multiple of 8 along both axes",
        ),
        (
            _with(trellis=np.zeros((16, 8, 44), np.int16)),
            "should have 16 words for each bit of a code. Got (16, 8, 44), with the "
            "code 'mul1': `bits` should be a multiple of 0.5 from 1 to 8. Got 2.75.",
        ),
        (_with(trellis=np.zeros((16, 8, 144), np.int16)), "from 1 to 8. Got 9."),
        (_with(mcg=_marker), "should have one code. Got both 'mcg' and 'mul1'."),
        (_with(mul1=_marker), "should be 0x83dcd12d, by which the code 'mul1' of"),
        (_with(mul1=np.float32(1)), "should have"),
        (
            lambda x: _with(mcg=_marker, trellis=np.zeros((16, 8, 24), np.int16))(
                _without("mul1")(x)
            ),
            "Only the code 'mul1' has half bits. Got 1.5 of 'mcg'.",
        ),
    ],
)
def test_errors(change, text, path):
    tensors, config, _ = exl3.made()
    files.save(path, change(tensors), config)
    with pytest.raises(ValueError, match=re.escape(text)):
        list(interop.open(path).values())


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((0,), ValueError, "`bits` should be a multiple of 0.5 from 1 to 8. Got 0."),
        ((2.25,), ValueError, "`bits` should be a multiple of 0.5 from 1 to 8."),
        (("2",), TypeError, "`bits` should be a number from 1 to 8. Got '2', of type"),
        ((2, "lut"), ValueError, "`code` should be '3inst', 'mcg' or 'mul1'. Got 'lut"),
        ((2.5, "mcg"), ValueError, "Only the code 'mul1' has half bits. Got 2.5 of"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_formats(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        EXL3(*arguments)
