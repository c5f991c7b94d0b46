"""Kernels for TPUs, in Pallas (Mosaic) and in XLA.

`_tiles.py` decodes and scales tiles of the weight; `_blocks.py` multiplies bare codes
and scales the result, for few rows; `_xla.py` leaves 8-bit codes to XLA. `_codes.py`
decodes bytes, `_call.py` is the loop over tiles that all kernels share, and
`_tuning.py` has the sizes of tiles.

May import `formats` and the modules of `kernels`. To add a kernel, write a file that
ends in `register_kernel(..., "tpu")`, and import it here.
"""

from . import _blocks as _blocks, _tiles as _tiles, _xla as _xla
