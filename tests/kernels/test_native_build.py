"""How the native library is put together. (`tests.native.sanitize` runs what it is put
together from.)"""

import pathlib
import shutil
import subprocess
import sys
import types
from typing import Any

import pytest

import eqquant.kernels.native.build as build


source = pathlib.Path(build.__file__).parent / "src"


@pytest.mark.parametrize("machine", ("x86_64", "aarch64"))
def test_units_are_products_of_sets(machine):
    units = {unit.name: unit for unit in build.kernel_units(machine)}
    expected = {"tables"}
    for name, found in build._all_sets[machine].items():
        assert (source / f"isa/{name}.h").is_file()
        for product in found.products.split():
            assert (source / f"products/{product}.h").is_file()
            expected.add(f"{name}_{product}")
    assert set(units) == expected
    assert all((source / unit.source).is_file() for unit in build.array_units(machine))


def test_units_have_the_features_of_their_set():
    units = {unit.name: unit for unit in build.kernel_units("x86_64")}
    assert {"-mavx2", "-mavx512f"} <= set(units["avx512_int16"].flags)
    assert "-mavx512f" not in units["avx2_float32"].flags
    units = {unit.name: unit for unit in build.kernel_units("aarch64")}
    assert "-march=armv8.2-a+dotprod" in units["neon_dot_int8"].flags
    assert "-march=armv8.2-a+dotprod" not in units["neon_float32"].flags
    assert units["neon_i8mm_int8_pairs"].flags[1] == "-march=armv8.2-a+dotprod+i8mm"


# Two sets, each a header and a line: the second extends the first.
files = {
    "isa/features.h": "enum Feature : unsigned { kSmall = 4, kLessSmall = 2 };",
    "isa/small.h": "struct Small { static constexpr int number = 1; };",
    "isa/less_small.h": "struct LessSmall { static constexpr int number = 2; };",
}
# A product whose kernel tells the set.
product = """
#include "products/kernels.h"
namespace eqquant {{
namespace {{
template <class V, class... Arguments>
int64_t number(Arguments...) {{
  return V::number;
}}
template <class V>
constexpr void add_{name}(Kernels& found) {{
  found.{kernel} = number<V>;
}}
}}  // namespace
}}  // namespace eqquant
"""
program = """
#include <cstdio>
#include <initializer_list>
#include "products/kernels.h"
int main() {
  using namespace eqquant;
  for (const Set& set : sets()) {
    const Kernels& table = set.kernels;
    const Feature own = set.features == kSmall ? kSmall : kLessSmall;
    std::printf("%s: %u %d, ", set.names, set.features, &table == &table_of(own));
    std::printf("%ld %ld %d ", table.lookup_tables_scratch({}, 0),
                table.float32_scratch({}, 0, 0), table.int8_matrices != nullptr);
  }
}
"""


def test_a_set_is_a_header_and_a_line(tmp_path, monkeypatch):
    try:
        compiler = build.find_compiler()
    except build.NotBuilt as e:
        pytest.skip(str(e))
    copy = tmp_path / "src"
    shutil.copytree(source, copy)
    for path in (copy / "isa").iterdir():
        if path.stem in build._sets:
            path.unlink()
    for name, text in files.items():
        text = f"#pragma once\nnamespace eqquant {{\n{text}\n}}\n"
        (copy / name).write_text(text)
    for name, kernel in (("one", "lookup_tables_scratch"), ("two", "float32_scratch")):
        text = product.format(name=name, kernel=kernel)
        (copy / f"products/{name}.h").write_text(text)
    sets = {
        "small": build._Set(None, "sse2", "one two"),
        "less_small": build._Set("small", "sse3", "one"),
    }
    monkeypatch.setattr(build, "_sets", sets)
    main = copy / "main.cpp"
    main.write_text(program)
    units = [*build.kernel_units(), build.Unit("main", "main.cpp", [])]
    objects = build.compile_all(units, compiler, copy, tmp_path, ["-O0"])
    build.run([*compiler, *objects, "-o", str(tmp_path / "main")])
    out = subprocess.run([tmp_path / "main"], check=True, capture_output=True)
    assert out.stdout.split() == (
        b"small: 4 1, 1 1 0 small less_small: 6 1, 2 1 0".split()
    )


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs from a checkout by a compiler that only notes that it ran. Returns how
    often it did, and whether there is a library then."""
    here, log = tmp_path / build._folder, tmp_path / "log"
    (here / "src").mkdir(parents=True)
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "if '--version' in sys.argv:\n"
        "    sys.exit()\n"
        f"pathlib.Path({str(log)!r}).open('a').write('once\\n')\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('built')\n"
    )
    compiler.chmod(0o755)
    core = types.SimpleNamespace(dependencies=["jax>=1"], requires_python=">=3.11")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build.NativeBuildHook, "_headers", lambda *_: tmp_path)
    monkeypatch.setattr(build, "kernel_units", lambda: [])

    def install(source, version="editable", native="require"):
        (here / "src/a.h").write_text(source)
        monkeypatch.setenv("EQQUANT_NATIVE", native)
        log.write_text("")
        metadata: Any = types.SimpleNamespace(core=core)
        hook = build.NativeBuildHook(str(tmp_path), {}, None, metadata, "", "wheel")
        data = {"force_include": {}}
        hook.initialize(version, data)
        (found,) = data["force_include"] or (here / library,)
        is_there = pathlib.Path(found).exists()
        hook.finalize(version, data, "")
        return len(log.read_text().split()), is_there

    library = build._platforms[build.this_platform()].library
    return install


def test_built_once(install):
    number, _ = install("int a;")
    assert number > 1
    # What is there is taken, also for a wheel,
    assert install("int a;") == (0, True) == install("int a;", "standard")
    # until something changes,
    assert install("int b;", "standard") == (number, True) == install("int b;")
    # or is not wanted.
    assert install("int b;", native="0") == (0, False)
    assert install("int b;") == (number, True)
