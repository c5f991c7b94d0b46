"""The wheel holds the package and the marker of its types. The source distribution
holds everything that the tests need."""

import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

import eqquant as eqq


pytestmark = pytest.mark.processes
root = pathlib.Path(__file__).parents[1]


@pytest.fixture
def built(tmp_path, monkeypatch):
    # The native library takes long to compile. `tests.native.wheel` checks its wheel.
    monkeypatch.setenv("EQQUANT_NATIVE", "0")

    def build(kind):
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            kind,
            "-d",
            tmp_path,
        ]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        (path,) = tmp_path.iterdir()
        return path

    return build


def test_wheel(built):
    path = built("wheel")
    assert path.name == f"eqquant-{eqq.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
    modules = {str(path.relative_to(root)) for path in root.glob("eqquant/**/*.py")}
    building = {f"eqquant/kernels/native/{name}.py" for name in ("build", "packings")}
    assert modules - building < set(names)
    costs = root.glob("eqquant/kernels/cpu/costs/*.json")
    assert {str(path.relative_to(root)) for path in costs} < set(names)
    # What NVRTC compiles where there is a GPU.
    sources = {path.name for path in root.glob("eqquant/kernels/gpu/ptx/src/*.cuh")}
    assert {f"eqquant/kernels/gpu/ptx/src/{name}" for name in sources} < set(names)
    assert "product.cuh" in sources
    assert "eqquant/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "eqquant",
        f"eqquant-{eqq.__version__}.dist-info",
    }


def test_sdist_tests_itself(built, tmp_path):
    with tarfile.open(built("sdist")) as file:
        file.extractall(tmp_path, filter="data")
    folder = tmp_path / f"eqquant-{eqq.__version__}"
    for top in ("eqquant", "tests", "notebooks", ".ci"):
        files = (path for path in (root / top).rglob("*") if path.is_file())
        expected = {str(path.relative_to(root)) for path in files}
        packed = {name for name in expected if (folder / name).is_file()}
        missing = {name for name in expected - packed if _is_source(name)}
        assert not missing, missing
    # `python -m pytest` puts the unpacked package first on the path.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, "--collect-only"], cwd=folder, check=True)
    some = [
        "tests/test_readme.py",
        "tests/test_architecture.py",
        "tests/formats/test_packing.py",
    ]
    subprocess.run([*command, *some], cwd=folder, check=True)


def _is_source(name):
    made = ("__pycache__/", "libeqquant.so", "not_built.txt", "built_from.txt")
    return not any(part in name for part in (*made, ".ipynb_checkpoints/"))
