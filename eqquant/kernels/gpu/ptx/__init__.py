"""Products of up to 256 rows on the tensor cores of every NVIDIA GPU since Ampere, in
CUDA C++ that is compiled when a program is traced.

`src/` contains the sources: the primitives of a lane (`lane.cuh`), the decoding of
codes to operands (`codes.cuh`), the scales (`scales.cuh`), weights of codes and scales
(`grid.cuh`) and of blocks that hold both (`blocks.cuh`), and the product
(`product.cuh`). `_kind.py` and `_blocks.py` derive from a format how the sources read
it, and `_plan.py` determines how a product is split over warps and blocks. `_nvrtc.py`
compiles the sources to PTX, `_cache.py` keeps the PTX on disk, and `_call.py` calls it
from an XLA program.
`_product.py` registers the kernel.

Nothing is built when the package is installed: NVRTC comes with `jax[cuda13]`. The
tests compile the same sources for a CPU, and run them lane by lane.
"""

from . import _product as _product
