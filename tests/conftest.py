import importlib.metadata
import os
import pathlib


# Before JAX is imported: sharding is tested on eight devices that one machine plays.
flags = ["--xla_force_host_platform_device_count=8"]
# Until JAX 0.10, XLA has a second way to compile fusions, which takes half as long.
# (With `XLA_FLAGS` in the environment, and be they empty, it is the way of users.)
jax_version = importlib.metadata.version("jax").split(".")
if "XLA_FLAGS" not in os.environ and [*map(int, jax_version[:2])] <= [0, 10]:
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import jaxtyping
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("eqquant", deadline=None, derandomize=True)
hypothesis.settings.load_profile("eqquant")


# Most of the suite is XLA compiling small programs. Those that a test reads, say for
# their memory, are compiled as for users: the test is marked `optimized`.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    less = item.get_closest_marker("optimized") is None
    if less != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", less)
        jax.clear_caches()


# Together, and last: what was compiled before is of no use to them.
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("optimized") is not None)


# What is compiled is mapped into memory, some maps for each program. Linux lets a
# process have 65530 of them, and beyond that XLA crashes.
@pytest.fixture(scope="module", autouse=True)
def limit_maps():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


# Users do not run the type checker, which stands before many errors here.
@pytest.fixture
def unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
