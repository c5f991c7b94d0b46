"""Builds wheels with the native library in them, and looks into them:

    python -m tests.native.wheel FOLDER [--target TARGET ...] [PYTHON ...]

Each is left in the folder, and is the same for all versions of Python. Targets are
`linux-x86_64`, `linux-aarch64`, `macos-arm64` and `windows-x86_64`; without any, the
wheel is for this platform. That is then multiplied with, in this Python and in those
given, which have what eqquant requires. Wheels for other targets are cross-compiled:
that for Linux on ARM by `g++-aarch64-linux-gnu` of Debian, those for macOS and Windows
by the Clang of the package `ziglang`.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import NamedTuple

from eqquant.kernels.native.build import this_platform

from . import binary


root = pathlib.Path(__file__).parents[2]
product = pathlib.Path(__file__).with_name("product.py")
# The tools that are installed beside this Python are found, too.
path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
environment = os.environ | {"EQQUANT_NATIVE": "require", "PATH": path}


class Target(NamedTuple):
    platform: str  # as Python calls it
    compiler: str
    tag: str
    library: str


_zig = f"{sys.executable} -m ziglang c++"
targets = {
    "linux-x86_64": Target(
        "linux-x86_64", "x86_64-linux-gnu-g++", "manylinux_2_*_x86_64", "libeqquant.so"
    ),
    "linux-aarch64": Target(
        "linux-aarch64",
        "aarch64-linux-gnu-g++",
        "manylinux_2_*_aarch64",
        "libeqquant.so",
    ),
    "macos-arm64": Target(
        "macosx-11.0-arm64",
        f"{_zig} -target aarch64-macos.11.0",
        "macosx_11_0_arm64",
        "libeqquant.dylib",
    ),
    "windows-x86_64": Target(
        "win-amd64",
        f"{_zig} -target x86_64-windows-gnu",
        "win_amd64",
        "libeqquant.dll",
    ),
}
# That the oldest supported systems have: of `manylinux_2_28`.
_glibc = 28
_largest = 8 * 2**20  # bytes of a wheel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.native.wheel")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--target", nargs="+", choices=(*targets, "all"), default=[])
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    here = _here()
    wanted = [*targets] if "all" in given.target else given.target or [here]
    for name in wanted:
        start = time.monotonic()
        wheel = build(given.folder, name)
        size, seconds = wheel.stat().st_size / 2**20, time.monotonic() - start
        print(f"{wheel.name}: {size:.1f} MiB, in {seconds:.0f} s", flush=True)
        if name == here:
            for python in (sys.executable, *given.pythons):
                multiply(wheel, python)
        else:
            print("It was linked, and was not run.", flush=True)


def build(folder: pathlib.Path, name: str) -> pathlib.Path:
    target = targets[name]
    more = {}
    if name != _here():
        more = {"CXX": target.compiler, "_PYTHON_HOST_PLATFORM": target.platform}
    with tempfile.TemporaryDirectory() as temporary:
        made = pathlib.Path(temporary, "made")
        hatch = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
        _run(*hatch, "-d", made, **more)
        (wheel,) = made.glob("*.whl")
        if name.startswith("linux"):
            made = pathlib.Path(temporary, "audited")
            audit = [sys.executable, "-m", "auditwheel", "repair"]
            _run(*audit, f"--wheel-dir={made}", wheel)
            (wheel,) = made.glob("*.whl")
        check(wheel, name)
        return pathlib.Path(shutil.move(wheel, folder / wheel.name))


def check(wheel: pathlib.Path, name: str) -> None:
    """That a wheel holds one library, for the target and no newer systems than ours."""
    target = targets[name]
    tags = wheel.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"], wheel.name
    tag = min(tags[2].split("."), key=len)
    assert pathlib.PurePath(tag).match(target.tag), wheel.name
    if name.startswith("linux"):
        assert int(tag.split("_")[2]) <= _glibc, wheel.name
    assert wheel.stat().st_size <= _largest, wheel.stat().st_size
    with zipfile.ZipFile(wheel) as file:
        files = [name for name in file.namelist() if not name.endswith("/")]
        native = [name for name in files if "/native/" in name]
        built = [name for name in native if not name.endswith(".py")]
        assert built == [f"eqquant/kernels/native/{target.library}"], native
        binary.check(file.read(built[0]), name)


def multiply(wheel: pathlib.Path, python: str) -> None:
    """In an environment of its own, which sees the packages of that of `python`."""
    with tempfile.TemporaryDirectory() as name:
        _run(python, "-m", "venv", name)
        mine = str(pathlib.Path(name, "bin", "python"))
        _run(mine, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        beside, packages = (
            subprocess.check_output(
                [each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                text=True,
            ).strip()
            for each in (mine, python)
        )
        pathlib.Path(beside, "packages.pth").write_text(packages)
        _run(mine, "-I", product)


def _here():
    platforms = {target.platform: name for name, target in targets.items()}
    platforms["macosx-arm64"] = "macos-arm64"  # of any version
    return platforms[this_platform()]


def _run(*command, **more):
    command = [str(part) for part in command]
    subprocess.run(command, check=True, env=environment | more, cwd=root)


if __name__ == "__main__":
    main()
