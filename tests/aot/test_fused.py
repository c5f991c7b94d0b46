import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

import eqquant as eqq
from eqquant.formats import AbstractGGUFBlocks
from eqquant.kernels.gpu._lanes import unit_of

from ..helpers import formats
from .compile_fused import of_format, sample, size


root = pathlib.Path(__file__).parents[2]


def label(case):
    target, name, m, first, across = case
    return f"{target}-{name}-{m}{'-first' * first}{'-across' * across}"


def compile_each(*args):
    """The programs of some cases, compiled in a process that knows of CUDA."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_fused", *args],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(sample, compile_each(), strict=True))


def format_of(name):
    format = formats[name]
    return format.format if isinstance(format, eqq.Rotated) else format


def is_decoded(name):
    """Whether no number can be decoded alone."""
    return isinstance(format_of(name), eqq.Trellis) or name == "bnb-double"


def sums_of_parts(name):
    """The bytes of the sums across memory for each row of inputs: of each code of a
    byte, but of two together, unless they are in blocks of GGUF."""
    problem: Any = types.SimpleNamespace(format=format_of(name))
    codes, nbytes = unit_of(problem)
    each = 2**18 if isinstance(problem.format, AbstractGGUFBlocks) else 2**17
    return 2**21 if nbytes > 1 else each * max(codes, 2)


# No array of the size of the weight is written, whatever the format, the layout and the
# GPU. What is written are inputs and results in float32, and either sums of parts, of
# at most so many threads, or a sixteenth of the weight, in bfloat16 and in float32.
def check(case, found):
    target, name, m, first, across = case
    fused = found["kernel"] == "fused_sums"
    if m == 1 and target != "h200":
        assert fused != is_decoded(name)
    ends = 3 * 4 * m * size
    if not fused:
        # (Scales of numbers in another order are looked up for each.)
        ordered = getattr(formats[name], "ordered", False)
        part = (5 if ordered else 3) / 16 * 2 * size * size
        if found["kernel"] != "decoded":
            # Of at most 12 M numbers, what was read, unpacked or swapped.
            assert target == "h200"
            part = 1.5 * 12 * 2**20
        assert found["temporary_bytes"] <= part + ends
        return
    # One or two fusions, in a loop over groups of rows or not. A rotation is one more,
    # and of blocks of GGUF, so is each of up to two results of a lane.
    of_blocks = isinstance(format_of(name), AbstractGGUFBlocks)
    is_rotated = isinstance(formats[name], eqq.Rotated)
    assert found["fusions"] <= 6 + 2 * of_blocks + is_rotated
    # (On an RTX 4090, XLA copies the bytes of some scales before the sums.)
    copied = found["stored_bytes"] // 8 if of_blocks and target == "rtx4090" else 0
    assert set(found["reads"].values()) <= ({0, 1, 2, 3} if copied else {0, 1})
    parts = 2**17 if first == across else min(2**21, m * sums_of_parts(name))
    if target in ("b200", "rtx5090"):
        parts *= 2
    if m == 1:
        names = "".join(found["reads"])
        assert "blocks" in names or ("codes" in names and "scale" in names)
        assert copied or set(found["reads"].values()) == {1}
    assert found["temporary_bytes"] <= 1.1 * (parts + ends) + copied


@pytest.mark.parametrize("case", sample, ids=label)
def test_no_copy_of_the_weight(compiled, case):
    check(case, compiled[case])


@pytest.mark.thorough
@pytest.mark.parametrize("name", formats)
def test_no_copy_of_any_weight(name):
    for case, found in zip(of_format(name), compile_each(name), strict=True):
        check(case, found)
