import ctypes
import functools as ft
import os
import pathlib
import re
import sysconfig
import threading

import jax


_folder = pathlib.Path(__file__).parent
_functions = (
    "forward",
    "transposed",
    "integers",
    "rounded",
    "bfloat16",
    "decoded",
    "decoded_transposed",
    "decoded_bfloat16",
    "decoded_integers",
    "few_integers",
    "bytes",
)
# The instruction sets, each of which includes those before it.
_levels = {"avx2": 1, "avx512": 2, "avx512_bf16": 3, "amx": 4}
# The newest version of XLA's FFI that was tested to accept a library compiled for the
# oldest supported jaxlib. (A jaxlib does not tell which versions it accepts.)
_tested_interface = (0, 5)
_lock = threading.Lock()


def missing() -> str | None:
    """Why the native library cannot be called, as the reason of a kernel that needs it.
    `None` if it can. The first call loads the library.

    **Raises:**

    A `RuntimeError` if the library is missing and the environment has
    `EQQUANT_NATIVE=require`. A `ValueError` if that variable is not `0`, `1` or
    `require`.
    """
    wanted = os.environ.get("EQQUANT_NATIVE", "1")
    if wanted not in ("0", "1", "require"):
        raise ValueError(
            "The environment variable `EQQUANT_NATIVE` should be '0', '1' or "
            f"'require'. Got {wanted!r}."
        )
    if wanted == "0":
        return "needs the native library, which `EQQUANT_NATIVE=0` turns off"
    found = _library()
    if not isinstance(found, str):
        return None
    if wanted == "require":
        raise RuntimeError(
            f"`EQQUANT_NATIVE=require`, but a kernel needs the native library, {found}."
        )
    return f"needs the native library, {found}"


def level() -> int:
    """The instruction set to use: 1 for AVX2, 2 for AVX512 with VNNI, 3 with
    AVX512_BF16, 4 with AMX. Call this only if nothing is `missing`. The environment
    variable `EQQUANT_NATIVE_LEVEL` limits it to `avx2`, `avx512`, `avx512_bf16` or
    `amx`."""
    most = os.environ.get("EQQUANT_NATIVE_LEVEL", "amx")
    if most not in _levels:
        raise ValueError(
            "The environment variable `EQQUANT_NATIVE_LEVEL` should be one of "
            f"{tuple(_levels)}. Got {most!r}."
        )
    found = _library()
    assert not isinstance(found, str)
    return min(found.eqquant_level(), _levels[most])


def refuse_slow_bfloat16() -> str | None:
    """Why kernels that multiply in bfloat16 come last on this CPU, or `None`. Call this
    only at `level` 3 or above."""
    # (Measured on an Emerald Rapids: AVX512_BF16 is as fast as float32. Tiles are not.)
    if level() == 3 and _is_intel():
        return "is slower than others on an Intel CPU without AMX"
    return None


@ft.cache
def _is_intel():
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()


def loaded() -> ctypes.CDLL:
    """The library. Call this only if nothing is `missing`."""
    found = _library()
    assert not isinstance(found, str)
    return found


def _library() -> ctypes.CDLL | str:
    with _lock:
        return _load()


def register_at_import() -> None:
    """Registers the functions with JAX at import, before any kernel is chosen: programs
    that another process compiled call them by name.

    This must not start JAX's backends, which the user may still want to configure. JAX
    checks the functions only when it starts, and fails if it refuses one. So with an
    FFI newer than the tested ones, the functions are registered later, when a kernel is
    first considered.
    """
    if os.environ.get("EQQUANT_NATIVE") == "0":
        return
    found = _checked()
    if not isinstance(found, str) and (_interface() or (0, 0)) <= _tested_interface:
        _register(found)


@ft.cache
def _load() -> ctypes.CDLL | str:
    """The library, registered with JAX, or why it cannot be."""
    library = _checked()
    if isinstance(library, str):
        return library
    try:
        # Once JAX has started, a refusal is an exception and nothing worse.
        jax.local_devices(backend="cpu")
        _register(library)
    except RuntimeError as e:
        return f"which JAX does not accept: {e}"
    return library


def _checked() -> ctypes.CDLL | str:
    # The library, or why it cannot be registered.
    platform = sysconfig.get_platform()
    if platform != "linux-x86_64":
        return f"which is for Linux on x86-64, not {platform}"
    path, reason = _folder / "libeqquant.so", _folder / "not_built.txt"
    if not path.exists():
        why = f": {reason.read_text('utf-8')}" if reason.exists() else ""
        return f"which was not built{why}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        return f"which the system cannot load: {e}"
    if library.eqquant_level() == 0:
        return "which is for CPUs with AVX2, FMA and F16C"
    # Check the version before registering: a function that JAX refuses would keep it
    # from starting.
    compiled = library.eqquant_interface_major(), library.eqquant_interface_minor()
    running = _interface()
    if running is None or compiled[0] != running[0] or compiled[1] > running[1]:
        return (
            f"which is for version {_text(compiled)} of XLA's FFI or a newer minor "
            f"version; that of jaxlib is {_text(running)}"
        )
    return library


def _register(library):
    for name in _functions:
        function = jax.ffi.pycapsule(getattr(library, f"eqquant_{name}"))
        jax.ffi.register_ffi_target(f"eqquant_{name}", function, platform="cpu")


def _interface() -> tuple[int, int] | None:
    """The version of XLA's FFI in the installed jaxlib, from its headers."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text() if header.exists() else ""
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _text(version):
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
