import ctypes
import functools as ft
import os
import shutil
import subprocess
import sys
import sysconfig

import jax
import pytest

import eqquant.kernels.native._library as library


# As if this process were the first to ask.
@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("EQQUANT_NATIVE", raising=False)
    monkeypatch.delenv("EQQUANT_NATIVE_LEVEL", raising=False)
    monkeypatch.setattr(library, "_load", ft.cache(library._load.__wrapped__))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_folder", tmp_path)
    return tmp_path


stub = """
#include "xla/ffi/api/c_api.h"
extern "C" {
int eqquant_interface_major() { return 0; }
int eqquant_interface_minor() { return MINOR; }
const char* eqquant_set(int i) { return i == 0 ? "avx2" : nullptr; }
int eqquant_is_here(int i) { return IS_HERE; }
XLA_FFI_Error* eqquant_product(XLA_FFI_CallFrame* call) {
  for (auto* part = call->extension_start; part != nullptr; part = part->next)
    if (part->type == XLA_FFI_Extension_Metadata) {
      auto* about = reinterpret_cast<XLA_FFI_Metadata_Extension*>(part)->metadata;
      about->api_version.major_version = 0;
      about->api_version.minor_version = MINOR;
    }
  return nullptr;
}
}
"""


def make_stub(folder, minor, is_here=1):
    """A library that says it is for a version and a machine, and can do nothing."""
    compiler = shutil.which("c++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs a C++ compiler, on Linux")
    source = folder / "stub.cpp"
    source.write_text(stub)
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            f"-DMINOR={minor}",
            f"-DIS_HERE={is_here}",
            source,
        ]
        + [f"-isystem{jax.ffi.include_dir()}", "-o", folder / "libeqquant.so"],
        check=True,
    )


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="is for Linux")


@needs_linux
def test_not_built(folder):
    assert library.missing() == "needs the native library, which was not built"
    (folder / "not_built.txt").write_text("no C++ compiler was found")
    library._load.cache_clear()
    expected = "which was not built: no C++ compiler was found"
    assert library.missing() == f"needs the native library, {expected}"


def test_other_platform(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-riscv64")
    assert "for Windows on x86-64, not linux-riscv64" in (library.missing() or "")


@needs_linux
def test_not_a_library(folder):
    (folder / "libeqquant.so").write_bytes(b"not a library")
    assert "which the system cannot load" in (library.missing() or "")


# These would keep JAX from starting, were they registered.
@pytest.mark.parametrize("minor", (99, 0))
def test_version(folder, minor):
    make_stub(folder, minor)
    running = library._interface()
    assert running is not None
    expected = (
        f"or a newer minor version; jaxlib's version is {running[0]}.{running[1]}"
        if minor == 99
        else "which JAX does not accept: "
    )
    assert expected in (library.missing() or "")


def test_version_is_that_of_jaxlib():
    major, minor = library._interface() or (0, 0)
    assert (major, minor) > (0, 2)


def test_interface_that_is_not_known(folder, monkeypatch):
    make_stub(folder, 3)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))
    assert "jaxlib's version is unknown" in (library.missing() or "")


def test_processor_without_the_instructions(folder):
    make_stub(folder, 3, is_here=0)
    assert "for CPUs with AVX2" in (library.missing() or "")


def test_off(monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    monkeypatch.setattr(library, "_load", None)  # is not asked
    expected = "needs the native library, which `EQQUANT_NATIVE=0` turns off"
    assert library.missing() == expected


@needs_linux
def test_required(folder, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "require")
    with pytest.raises(RuntimeError, match="`EQQUANT_NATIVE=require`.*was not built"):
        library.missing()


@pytest.mark.parametrize("value", ("", "2", "yes"))
def test_other_values(monkeypatch, value):
    monkeypatch.setenv("EQQUANT_NATIVE", value)
    with pytest.raises(ValueError, match="should be '0', '1' or 'require'"):
        library.missing()


# A processor that has AVX512 and AVX_VNNI, but no bfloat16 products.
class Machine(ctypes.CDLL):
    def __init__(self):
        sets = (b"avx2", b"avx2 avx_vnni", b"avx2 avx512", b"avx2 avx512 avx512_bf16")
        self.eqquant_set = lambda i: sets[i] if i < 4 else None
        self.eqquant_is_here = lambda i: i < 3
        self.eqquant_has = lambda i, name: name == (b"int8" if i else b"int8_matrices")


@pytest.mark.parametrize(
    ("most", "features"),
    (
        (None, {"avx2", "avx512"}),
        ("avx512_bf16", {"avx2", "avx512"}),
        ("avx512", {"avx2", "avx512"}),
        ("avx_vnni", {"avx2", "avx_vnni"}),
        ("avx2", {"avx2"}),
    ),
)
def test_the_set_in_use_is_the_last_that_is_here(most, features, monkeypatch):
    monkeypatch.setattr(library, "_load", Machine)
    if most is not None:
        monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", most)
    assert library.features() == features
    assert library.has("int8_matrices") == (most == "avx2")
    assert library.has("int8") == (most != "avx2")


def test_a_set_that_is_not_known(monkeypatch):
    monkeypatch.setattr(library, "_load", Machine)
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", "avx")
    with pytest.raises(ValueError, match="EQQUANT_NATIVE_LEVEL.*'avx512_bf16'"):
        library.features()


@needs_linux
def test_every_set_has_products_in_float32(monkeypatch):
    monkeypatch.undo()
    if library.missing() is not None:
        pytest.skip("needs the native library")
    for features, is_here in library._sets(library.loaded()):
        monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", features[-1])
        assert not is_here or library.features() == set(features)
        assert library.has("float32") and library.has("float32_across")
        assert not library.has("unknown")
        amx = "avx512_bf16" in library.features()
        assert library.has("bfloat16") == amx


# What a compiled program calls by its name is there from the import on; and JAX, which
# may be configured still, has not started.
@pytest.mark.processes
@needs_linux
@pytest.mark.parametrize("value", ("1", "0", "require"))
def test_registered_at_import(value):
    code = """
import concurrent.futures as futures
import os
import pathlib
import jax
import eqquant
import eqquant.kernels.native._library as library

is_loaded = "libeqquant" in pathlib.Path("/proc/self/maps").read_text()
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
os.environ["EQQUANT_NATIVE"] = "1"
with futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: library.missing(), range(8)))
assert len(set(found)) == 1
assert library._load.cache_info().misses == 1
print(is_loaded, found[0] is None)
"""
    environment = os.environ | {"EQQUANT_NATIVE": value}
    environment.pop("XLA_FLAGS", None)
    python = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(
        python, check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    is_loaded, is_there = out.stdout.split()
    assert is_loaded == ("False" if value == "0" else is_there)


# The newest of them that the tests run on, at least, is known.
def test_interface_is_known():
    assert (library._interface() or (9, 9)) <= library._tested_interface


# JAX could not start if it refused what was registered before.
@pytest.mark.parametrize("newest, registered", (((0, 5), True), ((0, 2), False)))
def test_not_registered_at_import_if_it_may_be_refused(
    folder, monkeypatch, newest, registered
):
    make_stub(folder, 3)
    monkeypatch.setattr(library, "_tested_interface", newest)
    asked = []
    monkeypatch.setattr(library, "_register", asked.append)
    library.register_at_import()
    assert bool(asked) == registered


def test_nothing_to_register_at_import(folder, monkeypatch):
    monkeypatch.setattr(library, "_register", None)  # is not called
    library.register_at_import()
