"""Arrays that are joined, split, stacked and transposed on their way into a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant import interop
from eqquant.interop import Join, load_into, Quantized, Split, Transposed

from ..helpers import formats, normal


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# One of each kind of stored arrays.
_kinds = (
    *("int8", "int4-affine", "ternary-tensor", "nested", "int-3-minimum"),
    *("int-4-ordered", "bnb-double", "mxfp4", "nvfp4", "q4_k"),
)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", _kinds)
def test_packed(name):
    parts = {
        f"layers.{i}.{part}.weight": eqq.quantize(
            (i + 1) * normal(32, 256, seed=2 * i + j), formats[name], axis=-1
        )
        for i in range(2)
        for j, part in enumerate("qk")
    }
    both = Join("layers.{i}.q.weight", "layers.{i}.k.weight")
    found = load_into({"qk": struct(2, 64, 256)}, parts, {both: "qk"})["qk"]
    assert found.format == formats[name] and found.axis == -1
    # Nothing grows but by what all rows shared, which is one number.
    assert found.nbytes <= sum(q.nbytes for q in parts.values()) + 4 * 2 * 64
    dense = {path: np.asarray(q.dequantize()) for path, q in parts.items()}
    w = np.stack(
        [
            np.concatenate([dense[f"layers.{i}.{x}.weight"] for x in "qk"])
            for i in range(2)
        ]
    )
    np.testing.assert_array_equal(found.dequantize(), w)
    y = found[1] @ normal(256, 3)
    np.testing.assert_allclose(y, w[1] @ normal(256, 3), rtol=1e-3, atol=1e-3)

    # And back.
    model = {path: struct(32, 256) for path in parts}
    names = Split("layers.{i}.q.weight", "layers.{i}.k.weight")
    back = load_into(model, {"qk": found}, {"qk": names})
    for path, q in back.items():
        assert q.format == formats[name]
        np.testing.assert_array_equal(q.dequantize(), dense[path])


def test_groups():
    # As GPT-NeoX has them: queries, keys and values of one head after each other.
    q, k, v = [numbers(12, 16, seed=i) for i in range(3)]
    fused = np.stack([w.reshape(4, 3, 16) for w in (q, k, v)], axis=1).reshape(36, 16)
    model = {x: struct(12, 16) for x in "qkv"}
    rule = {"w": Split("q", "k", "v", groups=4)}
    found = load_into(model, {"w": fused}, rule)
    for name, w in zip("qkv", (q, k, v), strict=True):
        np.testing.assert_array_equal(found[name], w)
    rule = {Join("q", "k", "v", groups=4): "w"}
    back = load_into({"w": struct(36, 16)}, dict(zip("qkv", (q, k, v))), rule)
    np.testing.assert_array_equal(back["w"], fused)
    # Of two matrices whose rows alternate, packed along their columns.
    packed = eqq.quantize(fused.T, eqq.Int8(), axis=-2)
    rule = {"w": Split("even", "odd", groups=18)}
    model = {"even": struct(16, 18), "odd": struct(16, 18)}
    found = load_into(model, {"w": packed}, rule)
    w = np.asarray(packed.dequantize())
    np.testing.assert_array_equal(found["even"].dequantize(), w[:, ::2])
    np.testing.assert_array_equal(found["odd"].dequantize(), w[:, 1::2])


def test_stacks():
    # Two new axes, in the order of the fields; and ten of them, in that of numbers.
    tree = {
        f"l.{i}.e.{e}.{x}": numbers(*s, seed=13 * i + e)
        for i in range(2)
        for e in range(11)
        for x, s in (("w", (3, 4)), ("b", (3,)))
    }
    model = {"w": struct(2, 11, 3, 4), "b": struct(2, 11, 3)}
    found = load_into(model, tree, {"l.{i}.e.{e}.{x}": "{x}"})
    for i in range(2):
        for e in range(11):
            np.testing.assert_array_equal(found["w"][i, e], tree[f"l.{i}.e.{e}.w"])
            np.testing.assert_array_equal(found["b"][i, e], tree[f"l.{i}.e.{e}.b"])
    back = load_into(
        {path: struct(*x.shape) for path, x in tree.items()},
        found,
        {"{x}": "l.{i}.e.{e}.{x}"},
    )
    for path, x in tree.items():
        np.testing.assert_array_equal(back[path], x)
    # Layers become a stack, while a stack of experts becomes single ones.
    tree = {f"l.{i}.w": numbers(3, 4, 5, seed=i) for i in range(2)}
    model = {str(e): struct(2, 4, 5) for e in range(3)}
    found = load_into(model, tree, {"l.{i}.w": "{e}"})
    np.testing.assert_array_equal(found["2"][1], tree["l.1.w"][2])


def test_in_turn():
    # First the names, then a split of given sizes, then a transpose and a copy.
    rules = [
        {"h.*": "layers.*"},
        {"layers.{i}.c": Split("a.{i}", "b.{i}", sizes=(2, 3), axis=-1)},
        {"a.{i}": (Transposed("a"), "c"), "b.{i}": None},
    ]
    tree = {f"h.{i}.c": numbers(4, 5, seed=i) for i in range(2)}
    found = load_into({"a": struct(2, 2, 4), "c": struct(2, 4, 2)}, tree, rules)
    np.testing.assert_array_equal(found["a"][1], tree["h.1.c"][:, :2].T)
    np.testing.assert_array_equal(found["c"][1], tree["h.1.c"][:, :2])
    q = eqq.quantize(normal(16, 32), eqq.Int8(16), axis=-1)
    found = load_into({"w": struct(32, 16)}, {"w": q}, {"w": Transposed("w")})
    assert found["w"].axis == -2 and found["w"].format == q.format
    np.testing.assert_array_equal(found["w"].dequantize(), q.dequantize().T)


def test_quantized_on_the_way():
    # As in files of type Q4_K_M, whose values are now and then in more bits.
    w = [np.asarray(normal(16, 256, seed=i)) for i in range(4)]
    kinds = ("q4_k", "q6_k", "q6_k", "q4_k")
    found = [eqq.quantize(x, kind, axis=-1) for x, kind in zip(w, kinds)]
    tree = dict(zip(("0.q", "0.v", "1.q", "1.v"), found))
    both = Join("{i}.q", "{i}.v")
    model = {"qv": struct(2, 32, 256)}
    with pytest.raises(ValueError, match="Q4_K.* and Q6_K.*Quantized"):
        load_into(model, tree, {both: "qv"})
    new = load_into(model, tree, {both: Quantized("qv", "q6_k")})["qv"]
    dense = np.asarray(new.dequantize()).reshape(4, 16, 256)
    assert str(new.format) == "Q6_K()" and new.axis == -1
    for i in (1, 2):
        np.testing.assert_array_equal(dense[i], found[i].dequantize())
    for i in (0, 3):
        again = eqq.quantize(found[i].dequantize(), "q6_k", axis=-1)
        np.testing.assert_array_equal(dense[i], again.dequantize())

    # Along the axis that products contract, of checkpoints in either order of axes.
    tree = {"a": w[0], "b": w[1].T, "c": np.concatenate(w[2:])}
    rules = {
        "a": Quantized("a", "nf4"),
        "b": Quantized(Transposed("b"), "nf4"),
        "c": Quantized(Split("c", "d"), "nf4"),
    }
    model = {x: struct(16, 256) for x in "abcd"}
    new = load_into(model, tree, rules)
    for x, each in zip("abcd", w):
        assert new[x].axis == -1
        wanted = eqq.quantize(each, "nf4", axis=-1).dequantize()
        np.testing.assert_array_equal(new[x].dequantize(), wanted)


def test_sharded():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, P(None, "x"))
    place = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32, sharding=sharding)
    parts = {
        f"{i}.{x}": eqq.quantize(normal(32, 32, seed=i), "nf4", axis=-1)
        for i in range(2)
        for x in "qk"
    }
    found = load_into([place], parts, {Join("{i}.q", "{i}.k"): "0"})[0]
    assert found.is_sharded and found.placement.spec == P(None, "x", None)
    np.testing.assert_array_equal(found[0].dequantize()[32:], parts["0.k"].dequantize())


_q4 = eqq.Int4(32)
_w = numbers(4, 8)
_q = eqq.quantize(normal(32, 64), "nf4", axis=-1)


@pytest.mark.parametrize(
    "model, tree, rename, lines",
    [
        # Members that are missing, in a stack and in what is joined.
        (
            {"w": (3, 4, 8)},
            {"l.0.w": _w, "l.2.w": _w},
            {"l.{i}.w": "w"},
            ["'l.0.w', 'l.2.w' cannot become 'w': there is no 'l.1.w'."],
        ),
        (
            {"qk.weight": (8, 8)},
            {"q.weight": _w, "key.weight": _w},
            {Join("q.{x}", "k.{x}"): "qk.{x}"},
            [
                "cannot become 'qk.{x}': there is no 'k.weight'.",
                "'key.weight' is not used",
            ],
        ),
        (
            {"w": (2, 4, 8)},
            {"l.0.w": _w, "l.99999999.w": _w},
            {"l.{i}.w": "w"},
            ["there is no 'l.1.w', 'l.2.w', 'l.3.w' and"],
        ),
        ({"w": (4, 8)}, {"l.a.w": _w}, {"l.{i}.w": "w"}, ["should be numbers"]),
        # What does not fit together.
        (
            {"w": (8, 8)},
            {"a": _w, "b": _w[:, :4]},
            {Join("a", "b"): "w"},
            ["differ in their shape: (4, 8) of 'a' and (4, 4) of 'b'"],
        ),
        (
            {"w": (64, 64)},
            {"a": _q, "b": eqq.quantize(normal(32, 64), "int8", axis=-1)},
            {Join("a", "b"): "w"},
            ["differ in their format: NF4() of 'a' and Int8() of 'b'"],
        ),
        (
            {"w": (8, 8)},
            {"a": _w, "b": _w.astype(np.float16)},
            {Join("a", "b"): "w"},
            ["differ in their dtype: float32 of 'a' and float16 of 'b'"],
        ),
        (
            {"w": (64, 64)},
            {"a": _q, "b": _q},
            {Join("a", "b", axis=-1): "w"},
            ["it is quantized along all axes but -2"],
        ),
        # Parts that are of other sizes, or not in the model.
        (
            {"a": (2, 8), "b": (3, 8)},
            {"w": _w},
            {"w": Split("a", "b")},
            ["'w' cannot become 'a', 'b': its size is 4, and not 2 + 3."],
        ),
        (
            {"layers.first": (2, 8), "layers.second": (2, 8)},
            {"w": _w},
            {"w": Split("layers.first", "layers.secon")},
            ["there is no 'layers.secon' in `model`. Is it 'layers.second'?"],
        ),
        (
            {"a": (2, 8), "b": (2, 8)},
            {"w": _w},
            [{"w": Split("c", "d")}, {"c": "a", "d": "b"}],
            ["`sizes` of its `Split` should be given"],
        ),
        (
            {"a": (1, 8), "b": (3, 8)},
            {"w": _w},
            {"w": Split("a", "b", groups=2)},
            ["2 groups do not divide the sizes [1, 3]"],
        ),
        ({"a": (8,)}, {"w": _w[0]}, {"w": Transposed("a")}, ["its shape is (8,)"]),
        ({"a.0": ()}, {"w": _q}, {"w": "a.{i}"}, ["its shape is (32, 64)"]),
        # What is no weight.
        (
            {"a": (8,)},
            {"w": _w[0]},
            {"w": Quantized("a", "nf4")},
            ["'w' cannot become 'a': a vector is not quantized, and its shape is (8,)"],
        ),
        (
            {"a": (4, 8)},
            {"w": _w.astype(np.int32)},
            {"w": Quantized("a", "nf4")},
            ["numbers of int32 are not quantized"],
        ),
        # A hint for each direction.
        (
            {"layers.0.attention.weight": (4, 8)},
            {"layers.0.attn.weight": _w},
            None,
            [
                "'layers.0.attn.weight' is not used. Is it 'layers.0.attention.weight'",
                "'layers.0.attention.weight' is missing. Is it 'layers.0.attn.weight'",
            ],
        ),
        (
            {"w": (8, 4)},
            {"w": _w},
            None,
            ["It is transposed: `rename` it to `Transposed('w')`"],
        ),
        # Layers are listed once.
        (
            {f"layers.{i}.w": (4, 8) for i in range(5)},
            {"w": _w},
            {"w": None},
            ["'layers.0.w' is missing. (And 4 others but for their numbers.)"],
        ),
    ],
)
def test_refused(model, tree, rename, lines):
    model = {path: struct(*shape) for path, shape in model.items()}
    with pytest.raises(ValueError) as e:
        load_into(model, tree, rename)
    for line in lines:
        assert line in str(e.value), str(e.value)


def test_orders_of_groups():
    format = eqq.Int(4, 32, "zero_point", ordered=True)
    a = eqq.quantize(normal(32, 64), format, axis=-1)
    block = a.layout.to_rows(a.stored)["block"][:, ::-1]
    stored = a.layout.from_rows(a.layout.to_rows(a.stored) | {"block": block})
    b = jax.tree.unflatten(jax.tree.structure(a), jax.tree.leaves({"stored": stored}))
    with pytest.raises(ValueError, match="'a', 'b' cannot be one array: .* 'block'"):
        load_into({"w": struct(64, 64)}, {"a": a, "b": b}, {Join("a", "b"): "w"})


def test_rules_that_are_none():
    for bad, error in (
        (lambda: Join("a"), TypeError),
        (lambda: Join("a.{i}", "b"), ValueError),
        (lambda: Split("a", "b", sizes=(1,)), ValueError),
        (lambda: Split("a", "b", groups=0), ValueError),
        (lambda: Join("a", "b", axis=0), ValueError),
        (lambda: load_into({}, {"a": _w}, {"{1}": "a"}), ValueError),
        (lambda: load_into({}, {"a" * 2000: _w}, {"{i}": "a"}), ValueError),
        (lambda: load_into({}, {"a": _w}, {1: "a"}), TypeError),
        (lambda: load_into({}, {"a": _w}, lambda name: Transposed(name)), TypeError),
    ):
        with pytest.raises(error):
            bad()
    # Where arrays only get other names.
    for rule in (
        {Join("a", "b"): "c"},
        {"a": Split("b", "c")},
        {"a": Transposed("b")},
        {"{x}": "b"},
    ):
        with pytest.raises(ValueError, match="cannot join, .*transpose or quantize"):
            interop.renamed("a", rule)
    assert interop.renamed("l.3.w", {"l.{i}.{x}": "{x}.{i}"}) == ("w.3",)
    assert interop.renamed("l.3.w.b", {"l.{i}.{x}": "{x}.{i}"}) == ("l.3.w.b",)
    assert interop.renamed("3.3.a.b", {"{i}.{i}.*": "*.{i}"}) == ("a.b.3",)
    assert interop.renamed("3.4.a", {"{i}.{i}.*": "*.{i}"}) == ("3.4.a",)


def test_written(tmp_path):
    # By the same rules, whose parts have given sizes.
    tree = {
        f"l.{i}.qk": eqq.quantize(normal(48, 64, seed=i), _q4, axis=-1)
        for i in range(2)
    }
    tree |= {"norm.weight": normal(8)}
    rename = {"l.{i}.qk": Split("l.{i}.q.weight", "l.{i}.k.weight", sizes=(32, 16))}
    interop.write(tmp_path, tree, "compressed-tensors", rename=rename)
    with interop.open(tmp_path) as checkpoint:
        assert checkpoint.entries["l.1.k.weight"].format == _q4
        found = dict(checkpoint)
    assert len(found) == 5
    np.testing.assert_array_equal(found["norm.weight"], tree["norm.weight"])
    for i in range(2):
        w = np.asarray(tree[f"l.{i}.qk"].dequantize())
        np.testing.assert_array_equal(found[f"l.{i}.q.weight"].dequantize(), w[:32])
        np.testing.assert_array_equal(found[f"l.{i}.k.weight"].dequantize(), w[32:])
    # And experts that become one array of a file for llama.cpp.
    tree = {f"e.{i}.w": numbers(4, 8, seed=i) for i in range(3)}
    interop.write_gguf(tmp_path / "a.gguf", tree, rename={"e.{e}.w": "blk.0.w"})
    w = interop.open(tmp_path / "a.gguf")["blk.0.w"]
    np.testing.assert_array_equal(w, np.stack(list(tree.values())))
    for rename, words in (
        ({"e.0.w": Split("a", "b")}, "`sizes` of its `Split` should be given"),
        (lambda name: "w", "'e.0.w' and 'e.1.w' would both be written"),
    ):
        with pytest.raises(ValueError, match=words):
            interop.write_gguf(tmp_path / "b.gguf", tree, rename=rename)
