import collections
import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import signal
import threading


# As in a terminal, for programs that tests start and interrupt. (What a shell runs in
# the background ignores it.)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before JAX is imported: sharding is tested on eight devices that one machine plays.
flags = ["--xla_force_host_platform_device_count=8"]
# Each worker has one processor.
flags.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Until JAX 0.10, XLA has a second way to compile fusions, which takes half as long.
# (With `XLA_FLAGS` in the environment, and be they empty, it is the way of users.)
jax_version = importlib.metadata.version("jax").split(".")
is_jax_10 = [*map(int, jax_version[:2])] <= [0, 10]
if "XLA_FLAGS" not in os.environ and is_jax_10:
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
where = os.environ.get("EQQUANT_TESTS", "cpu")
os.environ["JAX_PLATFORMS"] = where if where == "cpu" else f"{where},cpu"
collect_ignore = ["kernels/test_on_gpu.py"] if where == "cpu" else []

import hypothesis
import jax
import jaxtyping
import pytest
from jax._src import core
from jax._src.interpreters import mlir


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("eqquant", deadline=None, derandomize=True)
hypothesis.settings.load_profile("eqquant")


def _this_machine():
    """The processor and what compiles for it: compiled programs run on no other."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    processor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    about = ("model name", "flags", "Features")
    lines = {line for line in processor.splitlines() if line.startswith(about)}
    text = "\n".join([*sorted(lines or {processor}), os.environ["XLA_FLAGS"]])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"jax-{jax.__version__}-{jax.lib.__version__}-{platform.machine()}-{digest}"


_context = threading.local()


def _make_ir_context(make=mlir.make_ir_context):
    """As newer JAX has it: ten programs share a context of MLIR. To make one takes
    longer than to lower a small program. (Not those that are lowered within another, or
    where XLA partitions it, which binds the names of axes.)"""
    if mlir.ir.Context.current is not None or core.get_axis_env().axis_sizes:
        return make()
    if getattr(_context, "uses", 10) == 10:
        _context.value, _context.uses = make(), 0
    _context.uses += 1
    return _context.value


def _as_part(text):
    first, step = map(int, text.split("/"))
    if not 1 <= first <= step:
        raise ValueError(text)
    return first, step


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=_as_part,
        metavar="K/N",
        help="run every N-th of the selected tests, from the K-th on: `--part 2/3`",
    )


# Most of the suite's time is XLA compiling small programs, so they are kept from one
# run to the next. `JAX_ENABLE_COMPILATION_CACHE=0` in the environment compiles anew.
def pytest_configure(config):
    folder = config.rootpath / ".pytest_cache/xla" / _this_machine()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker and folder.exists() and len(os.listdir(folder)) > 60_000:
        shutil.rmtree(folder)
    if is_jax_10:
        mlir.make_ir_context = _make_ir_context
    # Looking up the lines of code that each operation comes from takes time.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # From now on: some models are made while tests are collected.
    jax.config.update("jax_disable_most_optimizations", where == "cpu")


# Programs that a test reads, say for their memory, are compiled as for users: the test
# is marked `optimized`.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    less = where == "cpu" and item.get_closest_marker("optimized") is None
    if less != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", less)
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    _leave_examples(items)
    # Together, and first: what they compile is of no use to others.
    items.sort(key=lambda item: item.get_closest_marker("optimized") is None)


def _leave_examples(items):
    """Of a test with many parameters, marked `examples(n)`, all but `n` are `thorough`:
    those that stay are spread evenly over the others."""
    families = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("examples")
        if marker is not None and item.get_closest_marker("thorough") is None:
            families[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (_, number), family in families.items():
        step = (len(family) - 1) / max(number - 1, 1)
        stay = {round(i * step) for i in range(number)}
        for i, item in enumerate(family):
            if i not in stay:
                item.add_marker("thorough")


# Last: of what `-m` and `-k` have selected.
@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_keep_a_part(config, items):
    if (part := config.getoption("--part")) is not None:
        first, step = part
        kept, left_out = items[first - 1 :: step], list(items)
        del left_out[first - 1 :: step]
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


# What was imported and collected stays: the garbage collector need not go through it
# again and again.
def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


# What is compiled is mapped into memory, some maps for each program. Linux lets a
# process have 65530 of them, and beyond that XLA crashes.
@pytest.fixture(scope="module", autouse=True)
def limit_maps():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        jax.clear_caches()


# Users do not run the type checker, which stands before many errors here.
@pytest.fixture
def unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
