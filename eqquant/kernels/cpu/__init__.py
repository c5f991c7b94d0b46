"""Kernels for CPUs that XLA compiles."""

from . import (
    _float_tiles as _float_tiles,
    _integer_tiles as _integer_tiles,
    _rsr as _rsr,
    _sweep as _sweep,
)
