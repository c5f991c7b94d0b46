"""What NVRTC makes of the kernels for each GPU: registers, and instructions."""

import collections
import functools as ft
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple

from eqquant.formats import AbstractComposite, AbstractGGUFBlocks, AbstractGrid
from eqquant.kernels.gpu.ptx import _blocks, _cache, _kind, _nvrtc, _plan, _product


# A100, RTX 30, RTX 40 and L4, H100, B200, RTX 50.
architectures = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class Loop(NamedTuple):
    """The loop over the contracted axis.

    - `per_weight`: the instructions of a lane for each number of the weight.
    - `names`: how many there are of each.
    """

    per_weight: float
    names: collections.Counter


def source(format, m, n=4096, k=14336):
    """The program for a product with a format. (The first matrix of a stack of its
    composites has one factor.)"""
    format = format.prepacked("gpu")
    stored, byte_scales = format.structs((n, k)), None
    if isinstance(format, AbstractGGUFBlocks):
        kind = _blocks.kind_of_blocks(format)
    else:
        if isinstance(format, AbstractComposite):
            byte_scales, format = format.byte_scales(stored), format.base
        assert isinstance(format, AbstractGrid)
        kind = _kind.kind_of_grid(format, byte_scales)
    assert kind is not None
    first, *scales = (stored[name].shape for name in kind.operands)
    made = _plan.plan(n, first[1], kind, 1)
    return _product.source_of(
        kind,
        made,
        rows=min(m, kind.most_rows),
        n=n,
        row_bytes=first[1],
        scale_shape=scales[0] if scales else (n, 1),
    )


@ft.cache
def compiled(source, architecture):
    """The machine code, and what `ptxas` says of it."""
    options = [f"-arch={architecture}", "--ptxas-options=-v"]
    options += _cache._bound(source, int(architecture.removeprefix("sm_")))
    return _nvrtc.compiled(source, _cache.headers(), options)


def tool(name):
    """A program of CUDA: on the path, or in a Python package."""
    found = shutil.which(name)
    for package, folder in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or []:
            for path in sorted(pathlib.Path(root).glob(f"{folder}/{name}")):
                found = found or str(path)
    return found


def loop(code, products):
    """The loop of a kernel that multiplies each register of weights so many times."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [tool("nvdisasm"), "-c", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    instructions, labels, before = [], {}, []
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            before.append(label[1])
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            labels |= dict.fromkeys(before, len(instructions))
            before = []
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", found[1]))
    loops = []
    for i, instruction in enumerate(instructions):
        target = re.match(r"BRA.*?(\.L_x_\d+)", instruction)
        if target and labels[target[1]] < i:
            body = instructions[labels[target[1]] : i + 1]
            loops.append([line.split()[0].split(".")[0] for line in body])
    (body,) = [names for names in loops if "HMMA" in names]
    names = collections.Counter(body)
    # (Of eight numbers that the lane has decoded.)
    return Loop(len(body) / (names["HMMA"] / products * 8), names)
