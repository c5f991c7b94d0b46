"""A build hook of [Hatchling](https://hatch.pypa.io/latest/plugins/build-hook/custom/)
that compiles the native library for wheels and editable installs.

A failure here does not fail the install: the reason is written to `not_built.txt`,
which `eqquant.explain` shows. With `EQQUANT_NATIVE=require` in the environment it is an
error, and with `EQQUANT_NATIVE=0` nothing is built.

An editable install leaves the library in the checkout. Other installs from there reuse
it until its sources change.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
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
_reason = "not_built.txt"
_sources = "built_from.txt"


class Platform(NamedTuple):
    """A platform that the library is built for."""

    machine: str  # the kind of its processors
    library: str  # the name of the file
    tag: str  # the tag of the wheel
    compiling: list[str]
    linking: list[str]
    compilers: tuple[str, ...]  # the compilers to look for


_linux = (["-fPIC"], ["-shared"], ("c++", "g++", "clang++"))
_oldest = ["-mmacosx-version-min=11.0"]
# By Python's names of platforms. On Windows, GCC is excluded, since it does not align
# vectors of 32 bytes on the stack (https://gcc.gnu.org/PR54412), and so is Visual
# Studio's compiler, which has other syntax for attributes and assembly.
_platforms = {
    "linux-x86_64": Platform("x86_64", "libeqquant.so", "linux_x86_64", *_linux),
    "linux-aarch64": Platform("aarch64", "libeqquant.so", "linux_aarch64", *_linux),
    "macosx-arm64": Platform(
        "aarch64",
        "libeqquant.dylib",
        "macosx_11_0_arm64",
        ["-fPIC", *_oldest],
        ["-shared", *_oldest],
        ("c++", "clang++"),
    ),
    "win-amd64": Platform(
        "x86_64",
        "libeqquant.dll",
        "win_amd64",
        [],
        ["-shared", "-static-libstdc++", "-static-libgcc", "-s"],
        ("clang++",),
    ),
}


def this_platform() -> str:
    """Returns Python's name of the platform to build for: this one, or
    `_PYTHON_HOST_PLATFORM` in the environment, which other tools also read."""
    where = sysconfig.get_platform()
    if not where.startswith("macosx-"):
        return where
    # The version does not matter. (A Python for macOS may be for several machines.)
    machine = where.split("-")[-1]
    return f"macosx-{platform.machine() if machine == 'universal2' else machine}"


class _Set(NamedTuple):
    extends: str | None
    features: str
    products: str


# The products that take longest to compile.
_slow = ("float32", "int8_few_rows", "nibbles", "lookup_tables", "pieces", "int16")
# The instruction sets, by their headers in `isa/`: the set that each extends, the
# compiler's names of its further features (after `-m`), and the products that have
# their own kernels for it, by their headers in `products/`. The library chooses among
# the sets at run time.
_x86 = {
    "avx2": _Set(
        None,
        "avx2 fma f16c",
        "pieces float32 float32_across transposed nibbles int8_matrices "
        "int8_few_rows int16 trellis trellis_int16",
    ),
    "avx_vnni": _Set(
        "avx2", "avxvnni", "int8 int8_few_rows int16 trellis trellis_int16"
    ),
    "avx512": _Set(
        "avx2",
        "avx512f avx512bw avx512vl avx512dq avx512vnni",
        "pieces float32 float32_across transposed lookup_tables "
        "int8 int8_few_rows int16 trellis trellis_int16",
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
        "",
        "pieces float32 float32_across transposed nibbles trellis",
    ),
    "neon_dot": _Set("neon", "arch=armv8.2-a+dotprod", "int8 int8_few_rows trellis"),
    "neon_i8mm": _Set("neon_dot", "arch=armv8.2-a+dotprod+i8mm", "int8_pairs"),
}
_all_sets = {"x86_64": _x86, "aarch64": _arm}


def this_machine() -> str:
    """Returns the kind of this platform's processors: `"x86_64"` or `"aarch64"`, or
    Python's name for it if there are no kernels for it."""
    where = this_platform()
    if where in _platforms:
        return _platforms[where].machine
    return platform.machine()


_sets = _all_sets.get(this_machine(), _x86)


class Unit(NamedTuple):
    """A source file, the flags to compile it with, and the name of its object file."""

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
        try:
            if wanted == "0":
                raise NotBuilt("EQQUANT_NATIVE was 0 when eqquant was installed")
            built_for = self._build(here, folder)
        except NotBuilt as e:
            _clear(folder)
            if wanted == "require":
                raise
            self.app.display_warning(f"The native library was not built: {e}")
            text = str(e).splitlines()[0]
            (folder / _reason).write_text(text, encoding="utf-8")
        else:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{built_for.tag}"
        if version != "editable":
            for path in folder.iterdir():
                build_data["force_include"][str(path)] = f"{_folder}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        self._temporary.cleanup()

    def _build(self, here, folder):
        where = this_platform()
        if where not in _platforms:
            raise NotBuilt(
                "it is for Linux on x86-64 and ARM, for macOS on ARM and for Windows "
                f"on x86-64, not {where}"
            )
        found = _platforms[where]
        compiler = find_compiler()
        digest = self._digest(here / "src", compiler, found)
        if _is_built(here, found.library, digest):
            if folder != here:
                shutil.copy(here / found.library, folder)
            return found
        _clear(folder)
        with tempfile.TemporaryDirectory() as name:
            temporary = pathlib.Path(name)
            units = [*kernel_units(), *array_units(), *_xla_units]
            flags = ["-O3", f"-isystem{self._headers(temporary)}", *found.compiling]
            objects = compile_all(units, compiler, here / "src", temporary, flags)
            # (Linkers may write other files beside it.)
            linked = str(temporary / found.library)
            run([*compiler, *found.linking, *objects, "-o", linked], env=_outside())
            shutil.move(linked, folder / found.library)
        if folder == here:
            (folder / _sources).write_text(digest, encoding="utf-8")
        return found

    def _digest(self, source, compiler, found):
        """Returns the digest of everything that the library is made from."""
        version = run([*compiler, "--version"], env=_outside())
        digest = hashlib.sha256(
            repr((compiler, version, found, self._oldest_jaxlib())).encode()
        )
        for file in (pathlib.Path(__file__), *sorted(source.rglob("*.*"))):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def _oldest_jaxlib(self):
        requirements = map(Requirement, self.metadata.core.dependencies)
        return _least(next(r.specifier for r in requirements if r.name == "jax"))

    # The FFI headers of the oldest supported jaxlib: a library compiled with newer
    # headers would keep an older JAX from starting.
    def _headers(self, folder):
        version = self._oldest_jaxlib()
        for jaxlib in importlib.metadata.distributions(name="jaxlib"):
            if jaxlib.version == version:
                return jaxlib.locate_file("jaxlib/include")
        # Download that jaxlib instead of requiring it for the build, so that an install
        # without access to it does not fail. Only its headers are used, so it may be
        # for another version of Python.
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


def _clear(folder):
    libraries = {platform.library for platform in _platforms.values()}
    for name in (*libraries, _reason, _sources):
        (folder / name).unlink(missing_ok=True)


def _is_built(folder, library, digest):
    found = folder / _sources
    is_complete = found.exists() and (folder / library).exists()
    return is_complete and found.read_text("utf-8") == digest


def find_compiler() -> list[str]:
    """Returns the command of the C++ compiler: `CXX` in the environment, or one on the
    path."""
    given = os.environ.get("CXX", "").strip()
    where = _platforms.get(this_platform(), _platforms["linux-x86_64"])
    for command in (given,) if given else where.compilers:
        # (A path may have spaces, and on Windows backslashes.)
        found = [command] if shutil.which(command) else shlex.split(command)
        if shutil.which(found[0]) is not None:
            return found
    wanted = "Clang" if where.compilers == ("clang++",) else "C++ compiler"
    raise NotBuilt(f"there is no {given}" if given else f"no {wanted} was found")


def kernel_units(machine: str | None = None) -> list[Unit]:
    """Returns the units of the kernels: one for each instruction set and product, and
    one for the tables of each set. Units that take long to compile come first.

    - `machine`: a result of `this_machine`, to build for another machine.
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
    """Returns the units of `arrays/`, compiled for the first of the instruction sets,
    which all machines with kernels have."""
    sets = _sets if machine is None else _all_sets[machine]
    flags = _of_set(sets, next(iter(sets)), "_arrays")
    names = ("encode", "trellis", "trellis_feedback", "rearrange")
    return [Unit(name, f"arrays/{name}.cpp", flags) for name in names]


# (These call the others, and compute little themselves.)
_xla_units = [
    Unit("ffi", "xla/ffi.cpp", ["-O1"]),
    Unit("ffi_encode", "xla/encode.cpp", ["-O1"]),
    Unit("older_glibc", "xla/older_glibc.cpp", []),
]


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
    """Compiles units in parallel, and returns their object files. Uses all cores for
    which there is enough memory."""
    # A product and a sum are rounded separately, as where formats decode. Much is
    # inlined even in small units. (Only GCC looks at their size.)
    always = [
        "-std=c++17",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "--param=inline-unit-growth=1000",
        *flags,
        f"-I{source}",
        "-c",
    ]

    zig = any("zig" in pathlib.Path(part).stem for part in compiler)

    def compile(unit):
        found = str(folder / f"{unit.name}.o")
        # Zig has no names of architectures, but accepts a processor with any features.
        mine = [
            re.sub(r"^-march=[^+]*", "-mcpu=generic", flag) if zig else flag
            for flag in unit.flags
        ]
        command = [*compiler, *always, *mine, str(source / unit.source), "-o", found]
        # (The compiler may be a package of the Python that pip runs on.)
        run(command, env=_outside())
        return found

    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Not on macOS and Windows.
        cores = len(os.sched_getaffinity(0))
    if hasattr(os, "sysconf"):  # Not on Windows.
        # (Each unit takes less than half a gigabyte.)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores = min(cores, memory // 2**30)
    with ThreadPoolExecutor(max(1, cores)) as pool:
        return list(pool.map(compile, units))


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Runs a command quietly, and returns its output. If it fails, raises `NotBuilt`
    with the output."""
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
    return result.stdout


def _least(specifiers):
    return next(s.version for s in specifiers if s.operator == ">=")


def _outside():
    """Returns the environment without the variables by which pip isolates a build."""
    inside = (
        "PYTHONPATH",
        "PYTHONNOUSERSITE",
        "PIP_CONSTRAINT",
        "_PYTHON_HOST_PLATFORM",
    )
    return {key: value for key, value in os.environ.items() if key not in inside}


def _pip(folder):
    found = [sys.executable, "-m", "pip"]
    result = subprocess.run([*found, "--version"], env=_outside(), capture_output=True)
    if result.returncode == 0:
        return found
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    scripts = "Scripts" if os.name == "nt" else "bin"
    return [str(folder / "venv" / scripts / "python"), "-m", "pip"]
