"""Importance matrices, against `gguf` as another writer and reader of GGUF, and against
the older kind of file, byte by byte."""

import pathlib
import struct

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.interop import convert, open, read_imatrix, write_gguf, write_imatrix


random = np.random.default_rng(0)
sums = {
    "blk.0.attn_q.weight": random.chisquare(1, (1, 64)).astype(np.float32) * 900,
    "blk.0.ffn_up_exps.weight": random.chisquare(1, (3, 64)).astype(np.float32),
}
counts = {
    "blk.0.attn_q.weight": np.array([900], np.float32),
    "blk.0.ffn_up_exps.weight": np.array([300, 0, 600], np.float32),
}


def write(path, sums=sums, counts=counts, type="imatrix"):
    """A file of `llama-imatrix`, written by `gguf`."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.kv_data[0].clear()
    writer.add_string("general.type", type)
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, x in sums.items():
        writer.add_tensor(f"{name}.in_sum2", x)
        writer.add_tensor(f"{name}.counts", counts[name][:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def old(entries, number=None):
    """A file of the older kind: means of squares, times the number of chunks."""
    data = struct.pack("<i", len(entries) if number is None else number)
    for name, (chunks, values) in entries.items():
        name = name.encode()
        data += struct.pack("<i", len(name)) + name
        data += struct.pack("<ii", chunks, len(values)) + values.tobytes()
    return data + struct.pack("<ii", 2, 8) + b"wiki.txt"


@pytest.mark.usefixtures("systems")
def test_read(tmp_path):
    stats = read_imatrix(write(tmp_path / "imatrix.gguf"))
    assert list(stats) == list(sums)
    gram = stats["blk.0.attn_q.weight"]
    assert gram.is_diagonal and gram.contracted == (1,)
    np.testing.assert_array_equal(gram.value, sums["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(gram.rows, [900])
    gram = stats["blk.0.ffn_up_exps.weight"]
    assert gram.contracted == (2,) and gram.value.shape == (3, 1, 64)
    np.testing.assert_array_equal(
        gram.value[[0, 2], 0], sums["blk.0.ffn_up_exps.weight"][[0, 2]]
    )
    # An expert that no token was routed to.
    np.testing.assert_array_equal(gram.value[1], 1)
    transposed = read_imatrix(tmp_path / "imatrix.gguf", axis=-2)
    assert transposed["blk.0.attn_q.weight"].contracted == (0,)
    named = read_imatrix(tmp_path / "imatrix.gguf", "llama")
    assert "model.layers.0.self_attn.q_proj.weight" in named


@pytest.mark.usefixtures("systems")
def test_read_the_older_kind(tmp_path):
    means = random.chisquare(1, 64).astype(np.float32)
    path = tmp_path / "imatrix.dat"
    path.write_bytes(old({"a.weight": (7, 7 * means), "b.weight": (0, 0 * means)}))
    stats = read_imatrix(path)
    np.testing.assert_allclose(stats["a.weight"].value[0], 7 * 512 * means, rtol=1e-6)
    np.testing.assert_array_equal(stats["a.weight"].rows, 7 * 512)
    np.testing.assert_array_equal(stats["b.weight"].value, 1)
    # The size of a chunk is not there. With small ones, there were few rows.
    small = read_imatrix(path, chunk_size=8)
    assert "a.weight" not in stats.few_rows and "a.weight" in small.few_rows
    np.testing.assert_allclose(small["a.weight"].value[0], 7 * 8 * means, rtol=1e-6)
    with pytest.raises(ValueError, match="`chunk_size`"):
        read_imatrix(path, chunk_size=0)
    path.write_bytes(
        old({"a.weight": (7, means), "blk.0.ffn_up_exps.weight": (7, means)})
    )
    with pytest.warns(UserWarning, match="ffn_up_exps.*does not say how many"):
        assert list(read_imatrix(path)) == ["a.weight"]


def test_damaged(tmp_path):
    path = tmp_path / "imatrix.dat"
    whole = old({"a.weight": (7, np.ones(64, np.float32))})
    for end in (0, 3, 6, 20, 60, len(whole) - 250):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="Could not open.*imatrix.dat"):
            read_imatrix(path)
    for data in (struct.pack("<i", -1), struct.pack("<ii", 1, 2**30), b"\xff" * 100):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="Could not open.*imatrix.dat"):
            read_imatrix(path)
    nan = {"a": np.full((1, 64), np.nan, np.float32)}
    bad = {
        "not an importance matrix": dict(type="model"),
        "finite": dict(sums=nan, counts={"a": np.ones(1, np.float32)}),
        "counts": dict(
            counts={**counts, "blk.0.attn_q.weight": np.ones(2, np.float32)}
        ),
    }
    for i, (match, how) in enumerate(bad.items()):
        other = write(tmp_path / f"{i}.gguf", **how)
        with pytest.raises(ValueError, match=match):
            read_imatrix(other)
    with pytest.raises(ValueError, match="`axis`"):
        read_imatrix(path, axis=0)


def test_written_as_it_is_read(tmp_path):
    model = {
        "blk.0.ffn_up.weight": eqx.nn.Linear(64, 32, use_bias=False, key=jr.key(0)),
    }
    x = jr.normal(jr.key(1), (50, 64))
    call = lambda m, x: jax.vmap(m["blk.0.ffn_up.weight"])(x)
    stats = eqq.calibrate(call, model, [x])
    path = tmp_path / "imatrix.gguf"
    rename = {"*.weight.weight": "*.weight"}
    write_imatrix(path, stats, rename, datasets=["a.txt"])
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    np.testing.assert_allclose(
        tensors["blk.0.ffn_up.weight.in_sum2"].data.ravel(),
        np.sum(np.asarray(x, np.float64) ** 2, 0),
        rtol=1e-5,
    )
    assert tensors["blk.0.ffn_up.weight.counts"].data.ravel().tolist() == [50]
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["a.txt"]
    again = read_imatrix(path)["blk.0.ffn_up.weight"]
    np.testing.assert_allclose(
        again.value, stats["blk.0.ffn_up.weight.weight"].diagonal, rtol=1e-6
    )
    conv = eqx.nn.Conv2d(3, 8, 3, key=jr.key(0))
    image = jr.normal(jr.key(1), (4, 3, 9, 9))
    filters = eqq.calibrate(lambda m, x: jax.vmap(m)(x), conv, [image])
    with pytest.raises(ValueError, match="`stats` should be of matrices"):
        write_imatrix(path, filters)


@pytest.fixture
def files(tmp_path):
    names = ("blk.0.ffn_up.weight", "blk.0.ffn_gate.weight")
    w = {n: jr.normal(jr.key(i), (32, 512)) for i, n in enumerate(names)}
    write_gguf(tmp_path / "in.gguf", w, {"general.architecture": "test"})
    size = np.exp(random.normal(size=(1, 512)) * 2).astype(np.float32)
    some = {n: 700 * size**2 for n in names}
    write(tmp_path / "imatrix.gguf", some, dict.fromkeys(names, np.full(1, 700, "f4")))
    return tmp_path, w, size[0]


@pytest.mark.thorough
@pytest.mark.parametrize("format", ("q4_k", "q2_k", "q6_k"))
def test_files_are_weighed(files, format):
    folder, w, size = files
    stats = read_imatrix(folder / "imatrix.gguf")
    lost = {}
    for how in (dict(), dict(stats=stats, method=eqq.ScaleSearch())):
        out = folder / f"{len(lost)}.gguf"
        outcomes = convert(folder / "in.gguf", out, format, **how)
        assert all(x.sqnr > 5 for x in outcomes)
        checkpoint = open(out)
        each = []
        for name, dense in w.items():
            error = np.asarray(dense - checkpoint[name].dequantize(), np.float64)
            each.append(np.sum((error * size) ** 2))
        lost[len(lost)] = sum(each)
    assert lost[1] < 0.9 * lost[0]
    q = eqq.tree_quantize(
        w, format, axis=-1, min_size=0, stats=stats, method=eqq.ScaleSearch()
    )
    for name in w:
        np.testing.assert_array_equal(
            q[name].dequantize(), checkpoint[name].dequantize()
        )


# Made by ggml's `ggml_quantize_chunk`, with an importance matrix: sixteen rows of a
# Student's t-distribution. (From the library that gpt4all 2.8.2 ships.)
data = pathlib.Path(__file__).parents[1] / "data"
samples = data / "imatrix_ggml.npz"
# Of the same rows, by the ggml of llama-cpp-python 0.3.36.
newer_samples = data / "gguf_types.npz"
iq4 = ("iq4_nl", "iq4_xs")


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "name",
    (
        *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1"),
        *iq4,
    ),
)
def test_errors_are_those_of_ggml(name):
    sample, newer = np.load(samples), np.load(newer_samples)
    w, inputs = sample["w"].astype(np.float32), sample["imatrix"]
    blocks = newer[f"{name.upper()}.weighted"] if name in iq4 else sample[name]
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])
    format = eqq.formats.as_format(name)
    stored = eqq.ScaleSearch().solve(jnp.asarray(w), format, jnp.asarray(inputs))
    error = lambda x: np.sum((np.asarray(x, np.float64) - w) ** 2 * inputs)
    plain = error(eqq.quantize(w, format, axis=-1).dequantize())
    assert error(format.decode(stored, 0)) < min(1.06 * error(theirs), 0.8 * plain)


# Of a small Llama with a tokenizer of its own, by `llama-imatrix` and `llama-quantize`,
# built from the source in llama-cpp-python 0.3.36: `python -m tests.llama_cpp.imatrix`.
of_llama_cpp = data / "imatrix_llama_cpp.gguf"


def test_files_of_llama_imatrix():
    stats = read_imatrix(of_llama_cpp)
    tensors = {x.name: x.data for x in gguf.GGUFReader(of_llama_cpp).tensors}
    assert len(stats) == 7 * 3 + 1
    # (It was run with a context of 128.)
    older = read_imatrix(of_llama_cpp.with_suffix(".dat"), chunk_size=128)
    assert {*older} == {*stats}
    for name in stats:
        found, before = stats[name], older[name]
        np.testing.assert_array_equal(
            np.ravel(found.value), np.ravel(tensors[f"{name}.in_sum2"])
        )
        assert found.rows.ravel() == tensors[f"{name}.counts"].ravel() == 20 * 128
        np.testing.assert_array_equal(found.rows, before.rows)
        np.testing.assert_allclose(found.value, before.value, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ("q4_k", "q2_k", "q3_k", "q5_k", "q6_k", "q4_0", *iq4))
def test_errors_are_those_of_llama_quantize(name):
    stats = read_imatrix(of_llama_cpp)
    sample = np.load(of_llama_cpp.with_suffix(".npz"))
    format = eqq.formats.as_format(name)
    weights = [key.removesuffix(".w") for key in sample if key.endswith(".w")]
    assert len(weights) == 3
    for weight in weights:
        w, inputs = sample[f"{weight}.w"], np.asarray(stats[weight].diagonal).ravel()
        blocks = sample[f"{weight}.{name}"]
        theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])
        stored = eqq.ScaleSearch().solve(jnp.asarray(w), format, jnp.asarray(inputs))
        error = lambda x: np.sum((np.asarray(x, np.float64) - w) ** 2 * inputs)
        assert error(format.decode(stored, 0)) < 1.06 * error(theirs)


@pytest.mark.thorough
def test_an_interrupted_run_keeps_to_its_statistics(files, monkeypatch):
    folder, w, size = files
    stats = read_imatrix(folder / "imatrix.gguf")
    out = folder / "out.gguf"

    names = set()

    def stop(done, total, name):
        # (As long as nothing is written, there is nothing to go on with.)
        names.add(name)
        if len(names - {""}) > 1:
            raise KeyboardInterrupt

    how = dict(stats=stats, method=eqq.ScaleSearch())
    with pytest.raises(KeyboardInterrupt):
        convert(folder / "in.gguf", out, "q4_k", progress=stop, **how)
    with pytest.raises(ValueError, match="options that differ"):
        convert(folder / "in.gguf", out, "q4_k")
    other = eqq.ScaleSearch(damping=0.1)
    with pytest.raises(ValueError, match="options that differ"):
        convert(folder / "in.gguf", out, "q4_k", stats=stats, method=other)
    assert all(x.format for x in convert(folder / "in.gguf", out, "q4_k", **how))


@pytest.mark.thorough
def test_statistics_of_other_arrays(files):
    folder, w, size = files
    stats = read_imatrix(folder / "imatrix.gguf")
    other = read_imatrix(folder / "imatrix.gguf", {"*": "other.*"})
    source, out = folder / "in.gguf", folder / "out.gguf"
    with pytest.raises(ValueError, match="`stats` should have entries for"):
        convert(source, out, "q4_k", stats=other)
    one = read_imatrix(folder / "imatrix.gguf", {"*gate*": None})
    with pytest.warns(UserWarning, match="`stats` has no entry for 1 of 2 arrays"):
        convert(source, out, "q4_k", stats=one, method=eqq.ScaleSearch())
    with pytest.raises(ValueError, match="`stats` should have its entry along"):
        convert(
            source,
            folder / "b.gguf",
            "q4_k",
            axis=-1,
            stats=read_imatrix(folder / "imatrix.gguf", axis=-2),
        )
    with pytest.raises(ValueError, match="blk.0.ffn_.*`method`"):
        convert(source, folder / "c", "rsrbinary", stats=stats)
    with pytest.raises(ValueError, match="`AWQ` scales other arrays"):
        convert(source, folder / "d", "int4", stats=stats, method=eqq.AWQ())
