"""Kernels for GPUs: compiled by XLA alone for any GPU, in CUDA C++ for NVIDIA GPUs
since Ampere (`ptx`), and in Pallas (Mosaic GPU) for Hopper.

`_fused.py` multiplies a few rows on any GPU, including AMD GPUs: the weight is decoded
within the fusions that compute the sums (`_lanes.py`). For more rows, `_decoded.py`
decodes the weight to memory, one part at a time. Kernels that copy stored arrays first
do so in parts, too (`_parts.py`). `_seconds.py` has the rates of GPUs, from which times
are estimated.

On Hopper, a warp-specialized pipeline copies tiles of `x` and of the codes to shared
memory (`_pallas.py`). Compute warpgroups decode the codes to operands of `wgmma` in
registers (`_words.py`). The codes may be of any grid of integers, of 16 numbers or of
8-bit floats. `_plan.py` chooses the sizes of tiles, and how far the contracted axis is
split. `_devices.py` identifies the GPU for which programs are compiled.

May import `formats` and the modules of `kernels`. To add a kernel, write a file that
ends in `register_kernel(..., "cuda")`, and import it here.
"""

from . import (
    _decoded as _decoded,
    _float as _float,
    _fused as _fused,
    _int8 as _int8,
    ptx as ptx,
)
from ._devices import blackwell as blackwell
