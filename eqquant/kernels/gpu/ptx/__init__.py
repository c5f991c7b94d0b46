"""Products of up to 64 rows on the tensor cores of every NVIDIA GPU since Ampere, in
CUDA C++ that is compiled when a program is traced.

`src/` has the sources: what a lane can do (`lane.cuh`), how codes become operands
(`codes.cuh`), scales (`scales.cuh`), and the product (`product.cuh`). `_kind.py` says
which formats they are for, and `_plan.py` how a product is split over warps and blocks.
`_nvrtc.py` compiles them to PTX, `_cache.py` keeps it, and `_call.py` calls it from a
program of XLA. `_product.py` registers the kernel.

Nothing is built when the package is installed: NVRTC comes with `jax[cuda13]`. The
tests compile the same sources for a CPU, and run them lane by lane.
"""

from . import _product as _product
