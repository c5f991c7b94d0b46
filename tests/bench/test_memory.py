import io

import jax.numpy as jnp
import pytest
from rich.console import Console

from eqquant import bench
from eqquant._cli import main
from eqquant.bench import _memory
from eqquant.bench._candidate import Candidate
from eqquant.bench._peers import _peer


@pytest.fixture(scope="module")
def measured():
    return bench.measure_memory()


def _of(measured, name, scanned):
    return [
        row.temporary_bytes
        for row in measured
        if row.name.strip() == name and row.scanned == scanned
    ]


# The backward pass keeps packed bytes. What grows with the number of layers are a few
# arrays of the size of the activations, 16 kB each, and no weights, of 1 MB each.
@pytest.mark.parametrize("scanned", (False, True))
def test_memory(measured, scanned):
    ours = _of(measured, "eqquant NF4()", scanned)
    dense = _of(measured, "dequantized", scanned)
    activations = 4 * 8 * 512
    assert ours[0] < 1e6
    for depth, temporary in zip((2, 8, 16), ours):
        assert temporary <= ours[0] + (depth - 2) * 4 * activations
    # As other libraries have it: see `eqquant bench --memory --peers`.
    assert dense[2] >= 16 * 4 * 512**2
    assert dense[2] > 10 * ours[2]


def _broken(w):
    def fn(x, w):
        raise RuntimeError("cannot do this\nand much more about it")

    return Candidate(weight=jnp.asarray(w), nbytes=1, decoded=lambda: w, fn=fn)


def test_table(monkeypatch, measured):
    peers = [_peer.Peer("qwix nf4, 64", (), _broken)]
    monkeypatch.setattr(_peer, "_all", peers)
    few = lambda peers: bench.measure_memory([2], width=64, peers=peers)
    monkeypatch.setattr(_memory, "measure_memory", few)
    file = io.StringIO()
    rows = bench.run_memory(peers=True, console=Console(file=file, width=100))
    assert [row.name.strip() for row in rows[::2]] == [
        "eqquant NF4()",
        "dequantized",
        "qwix nf4, 64",
    ]
    assert rows[-1].temporary_bytes is None
    assert rows[-1].failure == "RuntimeError: cannot do this"
    text = file.getvalue()
    assert "much more" not in text and text.count("cannot do this") == 1
    assert "scanned" in text and "unrolled" in text
    assert f"{rows[0].temporary_bytes / 1e6:.2f}" in text


def test_command(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_memory", lambda **kwargs: asked.append(kwargs))
    assert main(["bench", "--memory"]) == 0
    assert main(["bench", "--memory", "--peers"]) == 0
    assert asked == [dict(peers=False), dict(peers=True)]
