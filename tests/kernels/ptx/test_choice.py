import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import eqquant as eqq
from eqquant.kernels._table import choose
from eqquant.kernels.gpu import _devices
from eqquant.kernels.gpu.ptx import _cache, _call, _nvrtc

from ...helpers import all_formats, formats, normal
from .kinds import kinds, problem_of, weight


@pytest.fixture
def compiler(monkeypatch):
    """As if NVRTC were installed."""
    monkeypatch.setattr(_nvrtc, "missing", lambda: None)


def chosen(problem, gpu="NVIDIA A100-SXM4-80GB"):
    """The name of the kernel on a GPU, and what the others say."""
    device = jax.sharding.AbstractDevice(device_kind=gpu, num_cores=108, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        kernel, refused, _ = choose(problem)
    return kernel.name, {other.name: reason for other, reason in refused}


def case(m=1, k=128, n=64, format=kinds["int4"], dtype=jnp.bfloat16):
    x = jnp.asarray(normal(m, k), dtype)
    return problem_of(x, weight(k, n, format))


_names = (
    *("NVIDIA A100-SXM4-80GB", "NVIDIA A10G", "NVIDIA A10", "NVIDIA L4", "NVIDIA L40S"),
    *("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4070 Ti", "NVIDIA RTX A6000"),
    *("NVIDIA RTX 4000 SFF Ada Generation", "NVIDIA GeForce RTX 5090 Laptop GPU"),
    *("NVIDIA B200", "NVIDIA GB200", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
)
_older = ("Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce RTX 2080 Ti")
_older += ("Quadro RTX 4000", "NVIDIA GeForce GTX 1080")


@pytest.mark.parametrize("gpu", _names)
@pytest.mark.parametrize("m", (1, 16, 64, 256))
def test_since_ampere(compiler, gpu, m):
    assert chosen(case(m), gpu)[0] == "bfloat16_mma"


# Also formats whose blocks are of 16 numbers, or of the bytes of files.
@pytest.mark.examples(8)
@pytest.mark.parametrize("m", (1, 64))
@pytest.mark.parametrize("name", kinds)
def test_every_kind(compiler, name, m):
    assert chosen(case(m, format=kinds[name]))[0] == "bfloat16_mma"


# What it cannot read: some sizes of blocks, points, orders and codes.
@all_formats
def test_every_format(compiler, format):
    if isinstance(format, eqq.Rotated):
        pytest.skip("its inputs are rotated outside of kernels")
    q = eqx.filter_eval_shape(
        lambda: (
            eqq.tree_prepack(
                eqq.quantize(jnp.zeros((64, 512)), format, axis=-1), platform="gpu"
            ).mT
        )
    )
    problem = problem_of(jax.ShapeDtypeStruct((1, 512), jnp.bfloat16), q)
    others = (eqq.Dynamic8, eqq.Trellis, eqq.formats.Q5_0, eqq.formats.Q5_1)
    unread = (
        isinstance(format, (*others, eqq.formats.TQ1_0))
        or format == formats["ternary-48"]
        or getattr(format, "ordered", False)
        or getattr(format, "dtype", None) == jnp.float8_e5m2
    )
    assert (chosen(problem)[0] != "bfloat16_mma") == unread


@pytest.mark.parametrize("gpu", _older)
def test_before(compiler, gpu):
    name, reasons = chosen(case(), gpu)
    assert name == "fused_sums"
    reason = "needs a GPU of compute capability 8.0 or more, such as an A100, got"
    assert reasons["bfloat16_mma"] == f"{reason} {gpu}"


# What was timed goes before what was not.
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="needs newer JAX")
@pytest.mark.parametrize("gpu", ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
@pytest.mark.parametrize("name", ("int4", "nf4", "int8"))
def test_hopper(compiler, gpu, name):
    problem = case(format=kinds[name])
    assert chosen(problem, gpu)[0] == "bfloat16_wgmma"
    # (Which does not read rows of other lengths.)
    assert chosen(case(16, k=65, format=kinds[name]), gpu)[0] == "bfloat16_mma"


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="needs newer JAX")
@pytest.mark.parametrize("name", ("nvfp4", "q4_k", "int-6-64"))
@pytest.mark.parametrize("m", (1, 16, 64))
def test_hopper_unpacks_nothing(compiler, name, m):
    problem = case(m, 512, 64, kinds[name])
    assert chosen(problem, "NVIDIA H200")[0] == "bfloat16_mma"


def test_no_gpu(compiler):
    kernel, refused, _ = choose(case())
    assert kernel.name != "bfloat16_mma"
    reasons = {other.name: reason for other, reason in refused}
    assert reasons["bfloat16_mma"].endswith("such as an A100, got none")


@pytest.mark.parametrize(
    "capability, fits", (("7.5", False), ("8.0", True), ("12.1", True))
)
def test_capabilities(monkeypatch, capability, fits):
    # (Of a device, whose name does not matter.)
    monkeypatch.setattr(_devices, "_compiled_for", lambda: ("a GPU", capability))
    assert (_devices.ampere() is None) == fits
    assert _devices.capability() == round(10 * float(capability))


@pytest.mark.parametrize(
    "make, reason",
    (
        (lambda: case(257), "is for at most 256 rows, got 257"),
        (lambda: case(0), "is for operands that are not empty"),
        (lambda: case(k=0), "is for operands that are not empty"),
        (
            lambda: dataclasses.replace(case(), portable=True),
            "JAX does not allow its call",
        ),
        (
            lambda: dataclasses.replace(
                case(k=256, format=kinds["q4_k"]), portable=True
            ),
            "JAX does not allow its call",
        ),
        (
            lambda: dataclasses.replace(case(), rows=None),
            "needs to know the number of rows",
        ),
        (
            lambda: dataclasses.replace(case(), stack=70000),
            "at most 65535 weights at a time",
        ),
        (
            lambda: dataclasses.replace(case(), precision="highest"),
            "has errors up to 1e-04",
        ),
        (
            lambda: dataclasses.replace(
                case(format=eqq.Dynamic8(32)), precision="highest"
            ),
            "has errors up to 4e-03",
        ),
        (
            lambda: case(format=eqq.Dynamic8(32)),
            "needs integers of 1 to 8 bits, a table of 16",
        ),
        (
            lambda: case(format=eqq.Int4(48)),
            "in blocks of 16, or of a larger power of two",
        ),
    ),
)
def test_refused(compiler, make, reason):
    name, reasons = chosen(make())
    assert name != "bfloat16_mma"
    assert reason in reasons["bfloat16_mma"]


def test_without_nvrtc(monkeypatch):
    monkeypatch.setattr(_nvrtc, "_library", lambda: None)
    reason = "needs NVRTC, which `pip install 'jax[cuda13]'` installs and is not here"
    assert chosen(case())[1]["bfloat16_mma"] == reason
    monkeypatch.setattr(_nvrtc, "_library", object)
    monkeypatch.setattr(_nvrtc, "_broken", lambda: "needs NVRTC, which does not work")
    assert chosen(case())[1]["bfloat16_mma"] == "needs NVRTC, which does not work"
    monkeypatch.setenv("EQQUANT_PTX", "0")
    reason = "needs NVRTC, which `EQQUANT_PTX=0` turns off"
    assert chosen(case())[1]["bfloat16_mma"] == reason


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The programs that are compiled, with a cache of this test's own."""
    found = []

    def compile_ptx(source, headers, options):
        found.append(source)
        return f"// {source}\n"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_nvrtc, "compile_ptx", compile_ptx)
    monkeypatch.setattr(_nvrtc, "spilled", lambda *_: 0)
    monkeypatch.setattr(_nvrtc, "version", lambda: (13, 0))
    _cache.ptx_of.cache_clear()
    yield found
    _cache.ptx_of.cache_clear()


def test_programs_are_compiled_once(counted, tmp_path):
    for _ in range(2):
        assert _cache.ptx_of("a", 80) == "// a\n"
        _cache.ptx_of.cache_clear()
    assert _cache.ptx_of("b", 80) == "// b\n"
    assert counted == ["a", "b"]
    assert len([*tmp_path.rglob("*.ptx")]) == len([*tmp_path.rglob("*.*")]) == 2


@pytest.mark.parametrize("text", ("", "// a", "// 0\n// a\n", None))
def test_files_that_were_cut(counted, tmp_path, text):
    _cache.ptx_of("a", 80)
    (path,) = tmp_path.rglob("*.ptx")
    path.write_text(path.read_text()[:-2] if text is None else text)
    _cache.ptx_of.cache_clear()
    assert _cache.ptx_of("a", 80) == "// a\n"
    assert counted == ["a", "a"]


def test_a_cache_that_cannot_be_written(counted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _cache.ptx_of("a", 80) == "// a\n"


def test_other_compilers_and_gpus_compile_again(counted, monkeypatch):
    _cache.ptx_of("a", 80)
    _cache.ptx_of.cache_clear()
    monkeypatch.setattr(_nvrtc, "version", lambda: (13, 1))
    _cache.ptx_of("a", 80)
    _cache.ptx_of("a", 90)
    assert counted == ["a", "a", "a"]


@pytest.mark.parametrize(
    "spilled, chosen", (((0, 0, 0), 2), ((8, 0, 0), 0), ((8, 8, 0), 1), ((8, 8, 8), 1))
)
def test_registers(monkeypatch, spilled, chosen):
    found = {f"-DBLOCKS={blocks}": bytes for blocks, bytes in zip((2, 0, 1), spilled)}

    def of(source, headers, options, capability):
        assert (source, capability) == ("a", 90)
        return found[options[0]]

    monkeypatch.setattr(_nvrtc, "spilled", of)
    assert _cache._bound("a", 90) == [f"-DBLOCKS={chosen}"]


def test_calls():
    result = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    function = _call.call('a "b"\\\n\t', "name", result, grid=(4, 5, 6), block=32)
    traced = jax.jit(function).trace(jnp.zeros(3))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.ptx" in text
    for field in ("grid_x = 4", "grid_y = 5", "grid_z = 6", "block_x = 32"):
        assert f"{field} : i32" in text
