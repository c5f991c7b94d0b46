import ctypes
import functools as ft
import itertools as it
import os
import pathlib
import platform
import re
import sys
import sysconfig
import threading

import jax
import numpy as np
from jaxtyping import Float


_folder = pathlib.Path(__file__).parent
# As in `build.py`.
_ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
_file = f"libeqquant.{_ending}"
_functions = (
    "product",
    "int8_matrices",
    "trellis_product",
    "encode",
    "encode_tiles",
    "encode_with_feedback",
)
# The newest version of XLA's FFI that was tested to accept a library compiled for the
# oldest supported jaxlib. (A jaxlib does not tell which versions it accepts.)
_tested_interface = (0, 5)
_lock = threading.Lock()


def missing() -> str | None:
    """Returns why the native library cannot be called, as the reason of a kernel that
    needs it. `None` if it can. The first call loads the library. Raises a
    `RuntimeError` if the library is missing and the environment has
    `EQQUANT_NATIVE=require`. Raises a `ValueError` if that variable is not `0`, `1` or
    `require`."""
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


def number_of_set() -> int:
    """Returns the number of the instruction set to use: the last set of the library
    that this machine has. The environment variable `EQQUANT_NATIVE_LEVEL` limits it to
    a set and the sets before it. Call this only if nothing is `missing`."""
    sets = _sets(loaded())
    names = tuple(features[-1] for features, _ in sets)
    most = os.environ.get("EQQUANT_NATIVE_LEVEL", names[-1])
    if most not in names:
        raise ValueError(
            "The environment variable `EQQUANT_NATIVE_LEVEL` should be one of "
            f"{names}. Got {most!r}."
        )
    return max(i for i in range(names.index(most) + 1) if sets[i][1])


def functions() -> list[str]:
    """Returns the names of the functions that compiled programs may call."""
    return [f"eqquant_{name}" for name in _functions]


def features() -> frozenset[str]:
    """Returns the CPU features that the kernels in use need: the features of the
    instruction set in use, such as `{"avx2", "avx_vnni"}`. Call this only if nothing is
    `missing`."""
    return frozenset(_sets(loaded())[number_of_set()][0])


def number(name: str) -> int:
    """Returns the library's number for a name (see `src/xla/names.h`). Call this only
    if nothing is `missing`."""
    found = _number(name)
    assert found is not None, name
    return found


def knows(name: str) -> bool:
    """Whether the library has a number for a name."""
    return _number(name) is not None


def has_fours(
    packing: int,
    point_type: int,
    offset: int,
    block: int,
    k: int,
    points: Float[np.ndarray, " 256"],
) -> bool:
    """Whether four codes of a row can be brought into a lane of 8-bit integers, for
    blocks of `block` codes and rows of `k`. Call this only if nothing is `missing`."""
    function = loaded().eqquant_has_fours
    function.restype = ctypes.c_bool
    numbers = map(ctypes.c_int32, (number_of_set(), packing, point_type, offset))
    sizes = ctypes.c_int64(block), ctypes.c_int64(k)
    return function(*numbers, *sizes, ctypes.c_void_p(points.ctypes.data))


@ft.cache
def _number(name: str) -> int | None:
    found = loaded().eqquant_number(name.encode())
    return None if found < 0 else found


def has(product: str) -> bool:
    """Whether the instruction set in use has the kernels for a product, such as
    `"int16"`. Call this only if nothing is `missing`."""
    return bool(loaded().eqquant_has(number_of_set(), product.encode()))


def loaded() -> ctypes.CDLL:
    """Returns the library. Call this only if nothing is `missing`."""
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
    """Returns the library, registered with JAX, or why it cannot be registered."""
    library = _checked()
    if isinstance(library, str):
        return library
    try:
        # Once JAX has started, a refusal is only an exception.
        jax.local_devices(backend="cpu")
        _register(library)
    except RuntimeError as e:
        return f"which JAX does not accept: {e}"
    return library


def _checked() -> ctypes.CDLL | str:
    # Returns the library, or why it cannot be registered.
    where = sysconfig.get_platform()
    # (A Python for macOS may be for several machines.)
    mac = sys.platform == "darwin" and platform.machine() == "arm64"
    if where not in ("linux-x86_64", "linux-aarch64", "win-amd64") and not mac:
        return (
            "which is for Linux on x86-64 and ARM, for macOS on ARM and for Windows on "
            f"x86-64, not {where}"
        )
    path, reason = _folder / _file, _folder / "not_built.txt"
    if not path.exists():
        why = f": {reason.read_text('utf-8')}" if reason.exists() else ""
        return f"which was not built{why}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        return f"which the system cannot load: {e}"
    if not any(is_here for _, is_here in _sets(library)):
        return "which is for CPUs with AVX2, FMA and F16C"
    # Check the version before registering: a function that JAX refuses would keep it
    # from starting.
    compiled = library.eqquant_interface_major(), library.eqquant_interface_minor()
    running = _interface()
    if running is None or compiled[0] != running[0] or compiled[1] > running[1]:
        return (
            f"which is for version {_text(compiled)} of XLA's FFI or a newer minor "
            f"version; jaxlib's version is {_text(running)}"
        )
    return library


@ft.cache
def _sets(library: ctypes.CDLL) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """Returns the features of each instruction set that the library has kernels for,
    and whether this machine has the set. The last feature is the set's own."""
    library.eqquant_set.restype = ctypes.c_char_p
    sets = map(library.eqquant_set, it.count())
    names = it.takewhile(lambda names: names is not None, sets)
    return tuple(
        (tuple(found.decode().split()), bool(library.eqquant_is_here(i)))
        for i, found in enumerate(names)
    )


def _register(library):
    for name in functions():
        function = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, function, platform="cpu")


def _interface() -> tuple[int, int] | None:
    """Returns the version of XLA's FFI in the installed jaxlib, from its headers."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text("utf-8") if header.exists() else ""
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _text(version):
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
