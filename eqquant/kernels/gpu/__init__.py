"""Kernels for NVIDIA GPUs, in Pallas (Mosaic GPU)."""

from . import _decoded as _decoded, _float as _float, _int8 as _int8
