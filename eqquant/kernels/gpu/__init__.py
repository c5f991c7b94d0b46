"""Kernels for NVIDIA GPUs, written in Pallas (Mosaic GPU) for Hopper. On other GPUs,
XLA multiplies by the decoded weight.

A warp-specialized pipeline copies tiles of `x` and of the codes to shared memory
(`_pallas.py`). Compute warpgroups decode the codes to operands of `wgmma` in registers
(`_words.py`): of any grid of integers, of 16 numbers or of 8-bit floats. `_plan.py`
chooses the sizes of tiles, and how far the contracted axis is split. `_devices.py`
tells what programs are compiled for.

May import `formats` and the modules of `kernels`. To add a kernel, write a file that
ends in `register_kernel(..., "cuda")`, and import it here.
"""

from . import _decoded as _decoded, _float as _float, _int8 as _int8
from ._devices import blackwell as blackwell
