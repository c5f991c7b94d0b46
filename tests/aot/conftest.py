"""The tests are collected where their compilers are installed: those of `.[aot]`."""

import importlib.metadata

import jax


_installed = {distribution.name for distribution in importlib.metadata.distributions()}
_cuda = {"jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"}

collect_ignore = []
if "libtpu" not in _installed:
    collect_ignore.append("test_tpu.py")
if not _cuda <= _installed or jax.__version_info__ < (0, 11, 2):
    collect_ignore += ["test_cuda.py", "test_fused.py", "test_mma.py"]
elif "nvidia-cuda-nvrtc" not in _installed:
    collect_ignore.append("test_mma.py")
