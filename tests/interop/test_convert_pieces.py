"""Some rows of a matrix at a time."""

import os
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.interop._converting import _encode, _pieces

from ..helpers import normal
from . import large


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format, axis",
    (
        (eqq.NF4(), -1),
        (eqq.NF4(), -2),
        (eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)), -1),
        (eqq.Ternary(), -1),
        (eqq.formats.Q4_0(), -1),
        (eqq.RSRTernary(), -1),
        # All rows share a scale,
        (eqq.Ternary(scale="tensor"), -1),
        (eqq.Ternary(scale="tensor", rule="threshold"), -1),
        (eqq.FP8(scale="tensor"), -1),
        (eqq.NVFP4(), -2),
        # or what does not depend on the numbers,
        (eqq.Int(4, 32, ordered=True), -1),
        # or what it takes a whole matrix for.
        (eqq.Nested(eqq.NF4(16), scale=eqq.formats.BnbScale(32)), -1),
    ),
)
def test_some_rows_at_a_time(format, axis, monkeypatch):
    # Three pieces, the last of which is short.
    monkeypatch.setattr(_pieces, "_numbers", 400)
    w = normal(2, 9, 96) if axis == -1 else normal(2, 96, 9)
    w = jnp.sign(w) if isinstance(format, eqq.formats.AbstractExact) else w
    shares = []
    q, error = _encode.encode(np.asarray(w), format, axis, shares.append)
    expected = eqq.quantize(w, format, axis=axis)
    for a, b in zip(jtu.tree_leaves(q.stored), jtu.tree_leaves(expected.stored)):
        b = b.swapaxes(-1, -2) if expected.layout.row_axis == -1 else b
        assert np.array_equal(a, b) and a.dtype == b.dtype
    assert (q.shape, q.axis, q.layout.tail) == (w.shape, axis, expected.layout.tail)
    noise = np.asarray(expected.dequantize(), np.float64) - np.asarray(w, np.float64)
    assert np.isclose(error.noise, np.sum(noise**2), rtol=1e-5)
    assert np.isclose(error.signal, np.sum(np.square(w, dtype=np.float64)), rtol=1e-5)
    assert np.isclose(sum(shares), 1)


# The sums of a rotation may be rounded otherwise where there are fewer rows.
@pytest.mark.parametrize("axis", (-1, -2))
def test_rotated(axis, monkeypatch):
    monkeypatch.setattr(_pieces, "_numbers", 400)
    format = eqq.Rotated(eqq.Int8(16), 32)
    w = normal(2, 9, 96) if axis == -1 else normal(2, 96, 9)
    q, error = _encode.encode(np.asarray(w), format, axis, lambda share: None)
    expected = eqq.quantize(w, format, axis=axis)
    rows = expected.layout.to_rows(expected.stored)
    assert np.mean(q.stored["codes"] == rows["codes"]) > 0.99
    scale = q.stored["scale"].view(np.float32)
    np.testing.assert_allclose(scale, expected.scale, rtol=1e-6)
    noise = np.asarray(expected.dequantize(), np.float64) - np.asarray(w, np.float64)
    assert np.isclose(error.noise, np.sum(noise**2), rtol=1e-3)


_program = """
import sys
import eqquant
path, out, format = sys.argv[1:]
eqquant.interop.convert(path, out, eval(format, vars(eqquant.formats)))
# (What `getrusage` has begins with that of the process that started this one.)
(line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
print(line.split()[1])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    # An embedding, which stays as it is, and a matrix.
    folder = tmp_path_factory.mktemp("memory") / "a"
    large.write(folder, 4096, 0, 0, 8192, files=1)
    return folder


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
@pytest.mark.parametrize(
    "format", (eqq.NF4(), eqq.NVFP4(), eqq.Ternary(scale="tensor"))
)
def test_memory(format, source, tmp_path):
    argv = [sys.executable, "-c", _program, source, tmp_path / "out", str(format)]
    env = {**os.environ, "XLA_FLAGS": ""}
    found = subprocess.run(argv, env=env, capture_output=True, check=True)
    assert int(found.stdout) * 1024 < 2 * (4 * 4096 * 8192) + 300e6


# Threads wait for buffers, of which an error should keep none.
def test_errors_in_threads():
    pieces = _pieces.Pieces(np.zeros((2**12, 2**10), np.float32), False)
    together = threading.Barrier(_pieces._workers)

    def fail(piece, index, rows):
        if rows.start == 0:
            time.sleep(0.2)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        list(pieces.map(fail))
    # All threads are there.
    shares = [share for _, share in pieces.map(lambda *args: together.wait(10))]
    assert sum(shares) == 1 and len(shares) == 16
