import ctypes
import functools as ft
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence


# PTX for Ampere runs on all newer GPUs, too: the driver compiles it for its own GPU.
_architecture = "compute_80"
# NVRTC declares the newest version of PTX that it knows, and a driver rejects versions
# newer than its own. The kernels need no newer version than this one, of CUDA 11.4.
_version = "7.4"
# The major versions of CUDA whose NVRTC is loaded, if it is found, in this order.
_majors = (13, 12)


class Failure(RuntimeError):
    """An error of NVRTC, such as a source that it rejects."""


def missing() -> str | None:
    """Returns why NVRTC cannot compile kernels, or `None` if it can. A kernel that
    needs NVRTC gives this as the reason why it does not apply."""
    if os.environ.get("EQQUANT_PTX") == "0":
        return "needs NVRTC, which `EQQUANT_PTX=0` turns off"
    if _library() is None:
        return "needs NVRTC, which `pip install 'jax[cuda13]'` installs and is not here"
    return _broken()


def version() -> tuple[int, int]:
    """Returns the version of NVRTC. Call this only if `missing()` is `None`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_ptx(
    source: str, headers: Mapping[str, str], options: Sequence[str] = ()
) -> str:
    """Compiles CUDA C++ to PTX for every GPU since Ampere.

    **Arguments:**

    - `source`: the program.
    - `headers`: the text of each file that the program includes, by name.
    - `options`: options of the compiler, such as `-DNAME=VALUE`.

    **Raises:**

    A `Failure` with the compiler's log, if it rejects the program.
    """
    ptx = compiled(source, headers, [f"-arch={_architecture}", *options])[0]
    ptx = ptx.rstrip(b"\0").decode()
    return re.sub(r"^\.version .*$", f".version {_version}", ptx, count=1, flags=re.M)


def spilled(
    source: str, headers: Mapping[str, str], options: Sequence[str], capability: int
) -> int:
    """Returns the number of bytes that a lane of a program moves to memory because
    there are not enough registers, for a GPU of a compute capability (times ten). For
    one that is newer than NVRTC, this is that of an older GPU."""
    known = max(each for each in _capabilities() if each <= capability)
    options = [f"-arch=sm_{known}", "--ptxas-options=-v", *options]
    return spilled_in(compiled(source, headers, options)[1])


def spilled_in(log: str) -> int:
    """Returns the number of these bytes in a log of the compiler."""
    kinds = r"(\d+) bytes (?:spill stores|spill loads|stack frame)"
    return sum(map(int, re.findall(kinds, log)))


def compiled(
    source: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Returns the PTX, or with an option such as `-arch=sm_80` the machine code, and
    the compiler's log."""
    library, program = _loaded(), ctypes.c_void_p()
    text = lambda strings: (ctypes.c_char_p * len(strings))(
        *(string.encode() for string in strings)
    )
    names, number = text([*headers]), len(headers)
    created = library.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        b"eqquant.cu",
        number,
        text([*headers.values()]),
        names,
    )
    _check(created)
    try:
        options = ["--std=c++17", *options]
        status = library.nvrtcCompileProgram(program, len(options), text(options))
        log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            raise Failure(f"NVRTC {version()} does not compile a kernel: {log}")
        is_code = any(option.startswith("-arch=sm_") for option in options)
        return _read(program, "CUBIN" if is_code else "PTX"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program, what):
    size = ctypes.c_size_t()
    _check(getattr(_loaded(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_loaded(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


@ft.cache
def _capabilities() -> list[int]:
    library, number = _loaded(), ctypes.c_int()
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(number)))
    found = (ctypes.c_int * number.value)()
    _check(library.nvrtcGetSupportedArchs(found))
    return list(found)


@ft.cache
def _broken() -> str | None:
    # (Parts of NVRTC may be missing, and its version may not support these GPUs.)
    try:
        compile_ptx('extern "C" __global__ void nothing() {}', {})
    except Failure as e:
        return f"needs NVRTC, which does not work here: {e}"
    return None


def _check(status):
    if status != 0:
        _loaded().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise Failure(f"NVRTC: {_loaded().nvrtcGetErrorString(status).decode()}")


def _loaded() -> ctypes.CDLL:
    found = _library()
    assert found is not None
    return found


@ft.cache
def _library() -> ctypes.CDLL | None:
    for name in _files():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _files():
    """Yields the paths at which NVRTC may be: in the packages on which JAX depends, or
    in the system."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for major in _majors:
        for folder in folders:
            # (The folder is named after a version of CUDA, or after the package.)
            for path in sorted(pathlib.Path(folder).glob(f"*/lib/libnvrtc.so.{major}")):
                yield str(path)
    yield from (f"libnvrtc.so.{major}" for major in _majors)
