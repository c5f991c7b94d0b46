"""Kernels for CPUs (x86-64 and 64-bit ARM) in C++, called through XLA's foreign
function interface (FFI).

`src/` has the sources, which `build.py` compiles when the package is installed.
`_library.py` loads the library, or reports why it cannot. `_weight.py` turns a weight
into operands of an FFI call. `_decoded.py` registers the kernels for any format of
blocks, `_kernels.py` the kernels that read whole bytes of codes, and `_trellis.py` the
kernels for trellis codes.
`_integer_product.py` multiplies 8-bit integers, for training. `_rearrange.py` makes
stored arrays from the blocks of a file, in NumPy's memory and without XLA; `_memory.py`
allocates this memory. `_encode.py` encodes numbers in the formats that search for
scales. `_export.py` exports programs that call the library.

In `src/`, `isa` has the vectors of each instruction set, `weight` reads weights with
them, `products` multiplies, `xla` has the functions that XLA calls, and `arrays` has
functions that need no XLA. Each folder includes only the folders before it.

May import `formats` and the modules of `kernels`. To add a kernel, add its name and
function to `products/kernels.h`, call it in `xla/whole_products.h` and `xla/ffi.cpp`,
and register it in `_kernels.py`.
"""

from . import _decoded as _decoded, _kernels as _kernels, _trellis as _trellis
from ._encode import (
    encoder as encoder,
    most_encoded as most_encoded,
    tile_encoder as tile_encoder,
)
from ._export import export as export, is_portable as is_portable
from ._integer_product import integer_product as integer_product
from ._library import register_at_import
from ._memory import empty as empty
from ._rearrange import can_rearrange as can_rearrange, rearrange as rearrange
from ._weight import gains_by_panels as gains_by_panels


register_at_import()
