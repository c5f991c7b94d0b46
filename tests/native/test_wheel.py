"""What is found out about wheels and the libraries in them."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile

import pytest

import eqquant.kernels.native.build as build
from eqquant.kernels.native import _library

from . import binary, wheel


reads = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("lief") is None,
    reason="is for Linux, and needs lief",
)


@reads
def test_the_library_here():
    if _library.missing() is not None:
        pytest.skip("needs the native library")
    file = (_library._folder / _library._file).read_bytes()
    mine = f"linux-{build.this_machine()}"
    binary.check(file, mine)
    with pytest.raises(AssertionError, match=mine):
        binary.check(file, "windows-x86_64")


@reads
def test_a_library_that_lacks_functions(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, target = tmp_path / "one.cpp", tmp_path / "one.so"
    source.write_text('extern "C" int eqquant_product() { return 0; }\n')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", target], check=True)
    with pytest.raises(AssertionError, match="eqquant_int8_matrices"):
        binary.check(target.read_bytes(), f"linux-{build.this_machine()}")


@pytest.mark.parametrize(
    "name, tag",
    (
        ("linux-x86_64", "linux_x86_64"),
        ("linux-x86_64", "manylinux_2_34_x86_64"),
        ("linux-aarch64", "manylinux_2_28_x86_64"),
        ("macos-arm64", "macosx_12_0_arm64"),
        ("windows-x86_64", "any"),
    ),
)
def test_other_tags(name, tag, tmp_path):
    path = tmp_path / f"eqquant-1-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(AssertionError, match=tag):
        wheel.check(path, name)


def test_a_wheel_without_the_library(tmp_path):
    path = tmp_path / "eqquant-1-py3-none-win_amd64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("eqquant/kernels/native/build.py", "")
    with pytest.raises(AssertionError, match="build.py"):
        wheel.check(path, "windows-x86_64")


def test_targets_are_platforms():
    found = {each.platform: each.library for each in wheel.targets.values()}
    mac = found.pop("macosx-11.0-arm64")
    assert found | {"macosx-arm64": mac} == {
        name: platform.library for name, platform in build._platforms.items()
    }


# A Python for macOS may be for several machines, and for older systems.
@pytest.mark.parametrize(
    "python, machine, found",
    (
        ("linux-x86_64", "x86_64", "linux-x86_64"),
        ("macosx-11.0-arm64", "arm64", "macosx-arm64"),
        ("macosx-10.9-universal2", "arm64", "macosx-arm64"),
        ("macosx-10.9-universal2", "x86_64", "macosx-x86_64"),
        ("win-amd64", "AMD64", "win-amd64"),
    ),
)
def test_platforms(python, machine, found, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert build.this_platform() == found


def test_the_compiler_of_windows(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "this_platform", lambda: "win-amd64")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NotBuilt, match="no Clang was found"):
        build.find_compiler()
    # A path may have spaces.
    path = tmp_path / "a folder" / "clang++"
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(path))
    assert build.find_compiler() == [str(path)]
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
