"""Kernels for x86-64 CPUs in C++, called through XLA's foreign function interface. The
sources are in `src`; `build.py` compiles them when the package is installed.
"""

from . import _kernels as _kernels
from ._library import register_at_import


register_at_import()
