"""Kernels: products of a dense matrix with a stored, quantized one.

`_table` is the dispatch table of kernels (`_kernel`), `_problem` describes one product
(all that is known when a kernel is chosen), and `_reference` is the product that every
format has on every platform; `_by_rows` multiplies with some rows of a weight at a
time. `_adapted` converts stored arrays for kernels that read
them otherwise. `_finite` and `_digits` are shared by kernels of several backends: exact
results where a fast kernel overflows, and the splitting of inputs into 8-bit digits.
`_eager` runs primitives outside of `jax.jit`.

Each backend is a folder: `cpu` (compiled by XLA), `native` (C++), `gpu` and
`tpu` (Pallas). The table knows no backend: a backend registers its kernels when it is
imported.

This room imports `formats` only.

To add a kernel: write a function `(x, stored, problem) -> y` in a file of the backend's
folder and decorate it with `register_kernel(product, format_type, platform, ...)`. Pass
`supports`, which returns `None` or the reason why the kernel cannot compute a problem;
`error`, the bound that its results keep; and `seconds`, which predicts its time (on
CPUs, `measured(name)`). Import the file in the folder's `__init__.py`. Measure it by
`python -m eqquant.bench costs`. `tests/kernels` and `tests/laws` hold every registered
kernel to its bound. Code outside of the package decorates with
`eqquant.register_kernel` in the same way.

Weights that are stored otherwise than most kernels read them are converted before these
run, unless a kernel declares in `_adapted` that it reads them: scales of one byte
(`reads_byte_scales`), and rows in panels (`reads_panels`).
"""

from . import cpu as cpu, gpu as gpu, native as native, tpu as tpu
from ._eager import run_compiled as run_compiled
from ._kernel import Kernel as Kernel
from ._problem import (
    is_highest as is_highest,
    Problem as Problem,
    Product as Product,
)
from ._table import (
    Choice as Choice,
    choose as choose,
    platforms as platforms,
    register_kernel as register_kernel,
    supporting as supporting,
)
from .cpu import (
    Cost as Cost,
    describe_processor as describe_processor,
    Kind as Kind,
    kind_of as kind_of,
    measured_machine as measured_machine,
    processor as processor,
)
from .gpu import blackwell as blackwell
from .native import (
    can_rearrange as can_rearrange,
    empty as empty,
    encoder as encoder,
    export as export,
    gains_by_panels as gains_by_panels,
    integer_product as integer_product,
    is_portable as is_portable,
    most_encoded as most_encoded,
    rearrange as rearrange,
    tile_encoder as tile_encoder,
)
