"""Kernels for TPUs, in Pallas and in XLA."""

from . import _blocks as _blocks, _tiles as _tiles, _xla as _xla
