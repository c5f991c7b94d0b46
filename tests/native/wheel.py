"""Builds the wheel with the native library in it, for any Linux on this kind of CPU
whose system libraries are no older than those here, and multiplies with what it
installs:

    python -m tests.native.wheel FOLDER [PYTHON ...]

The wheel is left in the folder. It is the same for all versions of Python; to be tried
are this one and those given, which have what eqquant requires.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from eqquant.kernels.native.build import this_machine


root = pathlib.Path(__file__).parents[2]
product = pathlib.Path(__file__).with_name("product.py")
# The tools that are installed beside this Python are found, too.
path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
environment = os.environ | {"EQQUANT_NATIVE": "require", "PATH": path}


def main(folder: str, *pythons: str) -> None:
    pathlib.Path(folder).mkdir(exist_ok=True)
    wheel = build(pathlib.Path(folder))
    print(wheel.name)
    for python in (sys.executable, *pythons):
        multiply(wheel, python)


def build(folder: pathlib.Path) -> pathlib.Path:
    with tempfile.TemporaryDirectory() as name:
        made = pathlib.Path(name)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        _run(*pip, f"--wheel-dir={made}", root)
        (here,) = made.glob(f"*-py3-none-linux_{this_machine()}.whl")
        _run(sys.executable, "-m", "auditwheel", "repair", f"--wheel-dir={made}", here)
        (found,) = made.glob(f"*-py3-none-manylinux_*_{this_machine()}.whl")
        wheel = pathlib.Path(shutil.move(found, folder / found.name))
    with zipfile.ZipFile(wheel) as file:
        files = [name for name in file.namelist() if not name.endswith("/")]
    native = [name for name in files if "/native/" in name]
    built = [name for name in native if not name.endswith(".py")]
    assert built == ["eqquant/kernels/native/libeqquant.so"], native
    return wheel


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


def _run(*command):
    subprocess.run([str(part) for part in command], check=True, env=environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
