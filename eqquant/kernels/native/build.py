"""A build hook of [Hatchling](https://hatch.pypa.io/latest/plugins/build-hook/custom/)
that compiles the native library for wheels and editable installs.

A failure here does not fail the install: the reason is written to `not_built.txt`,
which `eqquant.explain` shows. With `EQQUANT_NATIVE=require` in the environment it is an
error, and with `EQQUANT_NATIVE=0` nothing is built.
"""

import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


_folder = "eqquant/kernels/native"
_mac = sys.platform == "darwin"
_library = "libeqquant.dylib" if _mac else "libeqquant.so"
_reason = "not_built.txt"


class _Set(NamedTuple):
    extends: str | None
    features: str
    products: str


# The products that take longest to compile.
_slow = ("float32", "int8_few_rows", "nibbles", "lookup_tables", "pieces", "int16")
# The instruction sets, by their headers in `isa/`: the set that each extends, what the
# compiler calls its further features (after `-m`), and the products that it has its
# own kernels for, by their headers in `products/`. The library chooses among the sets
# at run time.
_x86 = {
    "avx2": _Set(
        None,
        "avx2 fma f16c",
        "pieces float32 float32_across transposed non_finite nibbles int8_matrices "
        "int8_few_rows int16",
    ),
    "avx_vnni": _Set("avx2", "avxvnni", "int8 int8_few_rows int16"),
    "avx512": _Set(
        "avx2",
        "avx512f avx512bw avx512vl avx512dq avx512vnni",
        "pieces float32 float32_across transposed non_finite lookup_tables "
        "int8 int8_few_rows int16",
    ),
    "avx512_bf16": _Set("avx512", "avx512bf16", "bfloat16 bfloat16_nibbles"),
    "amx": _Set(
        "avx512_bf16",
        "amx-tile amx-int8 amx-bf16",
        "int8_amx bfloat16_amx bfloat16_nibbles_amx",
    ),
}
_arm = {
    "neon": _Set(
        None,
        "arch=armv8-a",
        "pieces float32 float32_across transposed non_finite nibbles",
    ),
    "neon_dot": _Set("neon", "arch=armv8.2-a+dotprod", "int8 int8_few_rows"),
}
_all_sets = {"x86_64": _x86, "aarch64": _arm}


def this_machine() -> str:
    """The kind of this machine's processor: `"x86_64"` or `"aarch64"`, or what Python
    calls it if there are no kernels for it."""
    found = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(found, found)


_sets = _all_sets.get(this_machine(), _x86)


class Unit(NamedTuple):
    """A source file to compile with some flags, to an object file of that name."""

    name: str
    source: str
    flags: list[str]


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
            where = "macosx_11_0_arm64" if _mac else f"linux_{this_machine()}"
            build_data["tag"] = f"py3-none-{where}"
        if version != "editable":
            for path in folder.iterdir():
                build_data["force_include"][str(path)] = f"{_folder}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        self._temporary.cleanup()

    def _build(self, source, target):
        where = sysconfig.get_platform()
        # (A Python for macOS may be for several machines.)
        mac = _mac and this_machine() == "aarch64"
        if where not in ("linux-x86_64", "linux-aarch64") and not mac:
            raise NotBuilt(
                f"it is for Linux on x86-64 and ARM and for macOS on ARM, not {where}"
            )
        compiler = find_compiler()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            units = [*kernel_units(), *array_units(), *_xla_units]
            oldest = ["-mmacosx-version-min=11.0"] if _mac else []
            flags = ["-O3", "-fPIC", f"-isystem{self._headers(folder)}", *oldest]
            objects = compile_all(units, compiler, source, folder, flags)
            kind = ["-shared", *oldest]
            if _mac:
                kind += ["-undefined", "dynamic_lookup"]
            run([*compiler, *kind, *objects, "-o", str(target)])

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


def kernel_units(machine: str | None = None) -> list[Unit]:
    """The units of the kernels: one for each instruction set and product, and one for
    the tables of them, by set. Those that take long to compile come first.

    - `machine`: as `this_machine` gives it, if they are for another one.
    """
    sets = _sets if machine is None else _all_sets[machine]
    units = [
        Unit(
            f"{name}_{product}",
            "products/unit.cpp",
            [
                *_of_set(sets, name),
                f"-includeproducts/{product}.h",
                f"-DEQQUANT_UNIT={name}_{product}",
                f"-DEQQUANT_ADD=add_{product}",
            ],
        )
        for name, found in sets.items()
        for product in found.products.split()
    ]
    parts = (
        f"EQQUANT_PART({_class(name)}, {part}_{product})"
        for name in sets
        for part in _lineage(sets, name)
        for product in sets[part].products.split()
    )
    units.sort(key=lambda unit: not unit.name.endswith(_slow))
    lines = (
        f"EQQUANT_SET({' | '.join(f'k{_class(part)}' for part in lineage)}, "
        f"{' '.join(lineage)})"
        for lineage in (_lineage(sets, name) for name in sets)
    )
    tables = [f"-DEQQUANT_SETS={' '.join(lines)}"]
    tables += [f"-DEQQUANT_PARTS={' '.join(parts)}"]
    return [*units, Unit("tables", "products/tables.cpp", tables)]


def array_units(machine: str | None = None) -> list[Unit]:
    """The units of `arrays/`: with the first of the instruction sets, which all
    machines that have kernels have."""
    sets = _sets if machine is None else _all_sets[machine]
    flags = _of_set(sets, next(iter(sets)), "_arrays")
    return [Unit(name, f"arrays/{name}.cpp", flags) for name in ("encode", "rearrange")]


_xla_units = [Unit("ffi", "xla/ffi.cpp", []), Unit("ffi_encode", "xla/encode.cpp", [])]


def _lineage(sets, name):
    extended = sets[name].extends
    return [*_lineage(sets, extended), name] if extended else [name]


def _of_set(sets, name, more=""):
    features = (sets[part].features.split() for part in _lineage(sets, name))
    flags = [f"-m{feature}" for some in features for feature in some]
    header = name + more
    return [*flags, f"-includeisa/{header}.h", f"-DEQQUANT_SET={_class(header)}"]


def _class(name):
    return "".join(part.capitalize() for part in name.split("_"))


def compile_all(
    units: list[Unit],
    compiler: list[str],
    source: pathlib.Path,
    folder: pathlib.Path,
    flags: list[str],
) -> list[str]:
    """Compiles units in parallel, and returns their object files: on all cores, but on
    no more than memory suffices for."""
    # A product and a sum are rounded each, as where formats decode. And much is inlined
    # even in small units. (Only GCC looks at their size.)
    always = [
        "-std=c++17",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "--param=inline-unit-growth=1000",
        *flags,
        f"-I{source}",
        "-c",
    ]

    def compile(unit):
        found = str(folder / f"{unit.name}.o")
        run([*compiler, *always, *unit.flags, str(source / unit.source), "-o", found])
        return found

    # (None takes half of a gigabyte.)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(cores, memory // 2**30))) as pool:
        return list(pool.map(compile, units))


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
