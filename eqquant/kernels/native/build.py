"""A build hook of [Hatchling](https://hatch.pypa.io/latest/plugins/build-hook/custom/)
that compiles the native library for wheels and editable installs.

A failure here does not fail the install: the reason is written to `not_built.txt`,
which `eqquant.explain` shows. With `EQQUANT_NATIVE=require` in the environment it is an
error, and with `EQQUANT_NATIVE=0` nothing is built.
"""

import importlib.metadata
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


_folder = "eqquant/kernels/native"
_library, _reason = "libeqquant.so", "not_built.txt"

_avx2 = ["-mavx2", "-mfma", "-mf16c"]
_avx512 = [*_avx2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]
_avx512_bf16 = [*_avx512, "-mavx512bf16"]
_amx = [*_avx512_bf16, *(f"-mamx-{part}" for part in ("tile", "int8", "bf16"))]
# The source files, with the flags of the instruction sets that each is compiled for.
# The library chooses among them at run time.
_sources = {
    "avx2.cpp": _avx2,
    "avx512.cpp": _avx512,
    "avx512_bf16.cpp": _avx512_bf16,
    "amx.cpp": _amx,
    "rearrange.cpp": _avx2,
    "ffi.cpp": [],
}


class NotBuilt(Exception):
    """The reason why the native library could not be built. The first line is a
    summary."""


class NativeBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("EQQUANT_NATIVE", "1")
        if wanted not in ("0", "1", "require"):
            raise ValueError(
                "`EQQUANT_NATIVE` should be '0', '1' or 'require' in the environment. "
                f"Got {wanted!r}."
            )
        here = pathlib.Path(self.root, _folder)
        self._temporary = tempfile.TemporaryDirectory()
        folder = here if version == "editable" else pathlib.Path(self._temporary.name)
        for name in (_library, _reason):
            (folder / name).unlink(missing_ok=True)
        try:
            if wanted == "0":
                raise NotBuilt("EQQUANT_NATIVE was 0 when eqquant was installed")
            self._build(here / "src", folder / _library)
        except NotBuilt as e:
            if wanted == "require":
                raise
            self.app.display_warning(f"The native library was not built: {e}")
            text = str(e).splitlines()[0]
            (folder / _reason).write_text(text, encoding="utf-8")
        else:
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
        if version != "editable":
            for path in folder.iterdir():
                build_data["force_include"][str(path)] = f"{_folder}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        self._temporary.cleanup()

    def _build(self, source, target):
        if sysconfig.get_platform() != "linux-x86_64":
            raise NotBuilt(f"it is for Linux on x86-64, not {sysconfig.get_platform()}")
        compiler = find_compiler()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            flags = ["-O3", "-fPIC", f"-isystem{self._headers(folder)}"]
            objects = compile_all(list(_sources), compiler, source, folder, flags)
            run([*compiler, "-shared", *objects, "-o", str(target)])

    # The FFI headers of the oldest supported jaxlib: a library compiled with newer
    # headers would keep an older JAX from starting.
    def _headers(self, folder):
        requirements = map(Requirement, self.metadata.core.dependencies)
        version = _least(next(r.specifier for r in requirements if r.name == "jax"))
        for jaxlib in importlib.metadata.distributions(name="jaxlib"):
            if jaxlib.version == version:
                return jaxlib.locate_file("jaxlib/include")
        # Download that jaxlib instead of requiring it for the build, so that an install
        # without access to it does not fail. Only its headers are used, so that it may
        # be for another version of Python.
        python = _least(SpecifierSet(self.metadata.core.requires_python))
        run(
            [*_pip(folder), "download", f"jaxlib=={version}", f"--dest={folder}"]
            + ["--no-deps", "--only-binary=:all:", f"--python-version={python}"]
            + ["--quiet", "--retries=1"],
            env=_outside(),
        )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            names = [name for name in file.namelist() if "/include/xla/ffi/" in name]
            file.extractall(folder, names)
        return folder / "jaxlib/include"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX` in the environment, or one on the path."""
    given = os.environ.get("CXX", "").strip()
    for command in (given,) if given else ("c++", "g++", "clang++"):
        found = shlex.split(command)
        if shutil.which(found[0]) is not None:
            return found
    raise NotBuilt(f"there is no {given}" if given else "no C++ compiler was found")


def compile_all(
    names: list[str],
    compiler: list[str],
    source: pathlib.Path,
    folder: pathlib.Path,
    flags: list[str],
) -> list[str]:
    """Compiles source files in parallel, and returns their object files."""
    # A product and a sum are rounded each, as where formats decode.
    always = ["-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", *flags, "-c"]

    def compile(name):
        found = str(folder / f"{name}.o")
        run([*compiler, *_sources[name], *always, str(source / name), "-o", found])
        return found

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile, names))


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Runs a command quietly. If it fails, raises `NotBuilt` with its output."""
    try:
        result = subprocess.run(
            command, env=env, capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError as e:
        raise NotBuilt(f"{command[0]} failed: {e}") from e
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit {result.returncode}"]
        reason = next((line for line in lines if "error: " in line.lower()), lines[-1])
        raise NotBuilt(
            f"{command[0]} failed: {reason}\n{shlex.join(command)}\n{result.stderr}"
        )


def _least(specifiers):
    return next(s.version for s in specifiers if s.operator == ">=")


def _outside():
    """The environment without the variables by which pip isolates a build."""
    inside = ("PYTHONPATH", "PYTHONNOUSERSITE", "PIP_CONSTRAINT")
    return {key: value for key, value in os.environ.items() if key not in inside}


def _pip(folder):
    found = [sys.executable, "-m", "pip"]
    result = subprocess.run([*found, "--version"], env=_outside(), capture_output=True)
    if result.returncode == 0:
        return found
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    return [str(folder / "venv/bin/python"), "-m", "pip"]
