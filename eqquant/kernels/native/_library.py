import ctypes
import functools as ft
import os
import pathlib
import re
import sysconfig
import threading

import jax


_folder = pathlib.Path(__file__).parent
_functions = ("forward", "transposed", "integers", "rounded", "bfloat16")
# Each has the instructions of those before it.
_levels = {"avx2": 1, "avx512": 2, "avx512_bf16": 3, "amx": 4}
# The newest interface of which it is known that it takes libraries for the oldest one
# that jaxlib may have here. It is not for a jaxlib to say which it takes.
_known_to_take = (0, 5)
_lock = threading.Lock()


def missing() -> str | None:
    """Why there is no native library to call: what is to be said of a kernel that needs
    it. `None` if there is one, which is loaded when this is first asked.

    **Raises:**

    A `RuntimeError` instead, if `EQQUANT_NATIVE=require` in the environment. A
    `ValueError` if that is neither `0`, nor `1`, nor `require`.
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
    """Which instructions may be used, if nothing is missing: 1 for AVX2, 2 for AVX512
    with VNNI, 3 for those of bfloat16, too, 4 for AMX. `EQQUANT_NATIVE_LEVEL` in the
    environment limits it to `avx2`, `avx512`, `avx512_bf16` or `amx`."""
    most = os.environ.get("EQQUANT_NATIVE_LEVEL", "amx")
    if most not in _levels:
        raise ValueError(
            "The environment variable `EQQUANT_NATIVE_LEVEL` should be one of "
            f"{tuple(_levels)}. Got {most!r}."
        )
    found = _library()
    assert not isinstance(found, str)
    return min(found.eqquant_level(), _levels[most])


def _library() -> ctypes.CDLL | str:
    with _lock:
        return _load()


def register_at_import() -> None:
    """Makes the functions known to JAX before any kernel is asked: programs that were
    compiled in another process call them by their names.

    JAX may not have started, and must not: it is to be configured still. So this is not
    done for an interface that is newer than all that are known, which might refuse the
    functions when JAX starts; with one of those, they are known once a kernel is asked.
    """
    if os.environ.get("EQQUANT_NATIVE") == "0":
        return
    found = _checked()
    if not isinstance(found, str) and (_interface() or (0, 0)) <= _known_to_take:
        _register(found)


@ft.cache
def _load() -> ctypes.CDLL | str:
    """The library, with its functions made known to JAX, or what keeps it from that."""
    library = _checked()
    if isinstance(library, str):
        return library
    try:
        # JAX has started, then, and refuses without harm.
        jax.local_devices(backend="cpu")
        _register(library)
    except RuntimeError as e:
        return f"which JAX does not take: {e}"
    return library


def _checked() -> ctypes.CDLL | str:
    # The library, or why there is none that could be registered.
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
        return "which is for processors with AVX2, FMA and F16C"
    # All that could be wrong has to be found before the functions are registered: what
    # JAX refuses of them when it starts keeps it from starting.
    compiled = library.eqquant_interface_major(), library.eqquant_interface_minor()
    running = _interface()
    if running is None or compiled[0] != running[0] or compiled[1] > running[1]:
        return (
            f"which is for version {_text(compiled)} of the interface of XLA, or newer "
            f"minor ones; that of jaxlib is {_text(running)}"
        )
    return library


def _register(library):
    for name in _functions:
        function = jax.ffi.pycapsule(getattr(library, f"eqquant_{name}"))
        jax.ffi.register_ffi_target(f"eqquant_{name}", function, platform="cpu")


def _interface() -> tuple[int, int] | None:
    """The version of XLA's interface for foreign functions, in the jaxlib that runs."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text() if header.exists() else ""
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _text(version):
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
