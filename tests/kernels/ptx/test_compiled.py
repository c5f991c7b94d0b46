import re
import subprocess

import pytest

import eqquant as eqq
from eqquant.kernels.gpu.ptx import _cache, _nvrtc

from . import machine_code
from .kinds import kinds


pytestmark = pytest.mark.skipif(
    (reason := _nvrtc.missing()) is not None, reason=f"{reason}"
)
each = pytest.mark.parametrize("architecture", machine_code.architectures)


@pytest.mark.examples(12)
@each
@pytest.mark.parametrize("m", (1, 16, 32, 64))
@pytest.mark.parametrize("name", kinds)
def test_nothing_is_spilled(name, m, architecture):
    _, log = machine_code.compiled(machine_code.source(kinds[name], m), architecture)
    assert _nvrtc.spilled_in(log) == 0
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    # Of 65536, for two blocks of 256 threads on a multiprocessor if there are few rows.
    # (Minima and two groups of rows may take more.)
    assert registers <= {1: 128, 16: 144}.get(m, 255)
    # What no kernel has to ask for.
    assert int((re.findall(r"(\d+) bytes smem", log) or ["0"])[0]) <= 48 * 1024


# Of one row.
@each
@pytest.mark.parametrize(
    "name, most",
    (
        ("int4", 2.1),
        ("int4-128", 2.0),
        ("int4-channel", 2.0),
        ("int4-affine", 2.4),
        ("gptq", 2.2),
        ("mlx", 2.3),
        ("q4_0", 2.6),
        ("nf4", 2.9),
        ("fp4", 3.1),
        ("int8", 2.5),
        ("int8-32", 2.9),
        ("int-8-zero-point", 4.2),
        ("fp8", 3.3),
        ("int-2", 2.2),
        ("ternary", 1.9),
        ("binary", 1.4),
        ("int-3", 2.7),
        ("int-5", 3.4),
        ("int-6-64", 2.9),
        ("mxfp4", 3.4),
        ("nvfp4", 3.5),
        ("int4-16", 2.7),
        ("q4_1", 3.5),
        ("iq4_xs", 4.0),
        ("q2_k", 4.3),
        ("q3_k", 5.0),
        ("q4_k", 3.0),
        ("q5_k", 4.0),
        ("q6_k", 5.3),
    ),
)
def test_instructions_of_a_weight(name, most, architecture):
    if machine_code.tool("nvdisasm") is None:
        pytest.skip("needs `nvdisasm`, of the package `nvidia-cuda-nvdisasm`")
    code, _ = machine_code.compiled(machine_code.source(kinds[name], 1), architecture)
    # (Beside weights, ones multiply inputs.)
    ones = name in ("mlx", "q4_1", "q2_k", "q4_k", "q5_k")
    loop = machine_code.loop(code, 2 if ones else 1)
    print(name, architecture, f"{loop.per_weight:.2f}", loop.names.most_common(8))
    assert loop.per_weight <= most


# What drivers get is for all of these, and of a version that they know.
@each
def test_ptx(architecture, tmp_path):
    source = machine_code.source(eqq.Int4(), 1)
    ptx = _cache.ptx_of(source, int(architecture.removeprefix("sm_")))
    assert ".version 7.4" in ptx and ".target sm_80" in ptx
    if (ptxas := machine_code.tool("ptxas")) is None:
        pytest.skip("needs `ptxas`, of the package `nvidia-cuda-nvcc`")
    path = tmp_path / "product.ptx"
    path.write_text(ptx)
    command = [ptxas, f"-arch={architecture}", path, "-o", tmp_path / "product.cubin"]
    subprocess.run(command, check=True)


# Two blocks leave too few registers for 64 rows. (An unknown GPU is like a known one.)
@pytest.mark.parametrize("capability", (80, 100, 12345))
def test_spilled_bytes(capability):
    source = machine_code.source(eqq.Int4(), 64)
    spilled = lambda blocks: _nvrtc.spilled(
        source, _cache.headers(), [f"-DBLOCKS={blocks}"], capability
    )
    assert spilled(2) > 0
    assert spilled(0) == 0


def test_failures(monkeypatch):
    with pytest.raises(_nvrtc.Failure, match="does not compile.*no_such_type"):
        _nvrtc.compile_ptx("no_such_type x;", {})
    # One that is not for these GPUs.
    monkeypatch.setattr(_nvrtc, "_architecture", "compute_20")
    _nvrtc._broken.cache_clear()
    assert "does not work here: NVRTC" in str(_nvrtc.missing())
    _nvrtc._broken.cache_clear()
