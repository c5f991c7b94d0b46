import ast
import pathlib
import subprocess
import sys

import eqquant as eqq


package = pathlib.Path(eqq.__file__).parent

# From the ground up. A room imports from those before it, by their front doors: what
# their `__init__.py` has. Rooms beside each other do not know each other.
rooms = (
    ("_any_encoding", "_interrupts", "_progress"),
    ("formats",),
    ("kernels",),
    ("_product",),
    ("_array",),
    ("_solvers",),
    ("_ops",),
    ("_implicit",),
    ("_trace",),
    ("_tree",),
    ("train", "interop"),
    ("_report",),
    ("demo",),
    ("bench",),
    ("_cli",),
    ("__main__",),
)
level = {name: i for i, names in enumerate(rooms) for name in names}
# Who may import what. Some of it takes long, and is imported where it is used.
owners = {
    "matplotlib": {"_report", "demo", "bench"},
    "optax": {"train"},
    "rich": {"_progress", "_report", "demo", "bench", "_cli"},
    "jax.experimental.pallas": {"kernels"},
}
slow = {"matplotlib", "rich", "jax.experimental.pallas"}
run = {"demo", "bench", "_cli"}

files = sorted(package.rglob("*.py"))


def _room(file):
    return file.relative_to(package).parts[0].removesuffix(".py")


def _imports(file):
    """The modules that a file imports, and whether it does at its top."""
    tree = ast.parse(file.read_text("utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    depth = len(file.relative_to(package).parts)
    for node in ast.walk(tree):
        at_top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_top
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0:
                yield module, at_top
            elif node.level < depth:
                yield f"eqquant.{_room(file)}", at_top
            elif module:
                yield f"eqquant.{module}", at_top
            else:
                for alias in node.names:
                    yield f"eqquant.{alias.name}", at_top


def _complaints(file):
    room = _room(file)
    for module, at_top in _imports(file):
        if module.startswith("eqquant."):
            _, target, *inside = module.split(".")
            if target != room and level[target] >= level[room]:
                yield f"imports {module}, which is not below it"
            if target != room and len(inside) > 0:
                yield f"imports {module}, which is private to its room"
        if module.startswith("jax._src"):
            yield f"imports {module}, which is private to JAX"
        for name, allowed in owners.items():
            if module == name or module.startswith(name + "."):
                if room not in allowed:
                    yield f"imports {module}, which is for {sorted(allowed)}"
                if at_top and name in slow and room not in run:
                    yield f"imports {module} at its top, which takes long"


def test_imports():
    found = [
        f"{file.relative_to(package)} {complaint}"
        for file in files
        if _room(file) != "__init__"
        for complaint in _complaints(file)
    ]
    assert found == []


# Backends register their kernels; the dispatch table does not know them.
def test_the_dispatch_table_knows_no_backend():
    folder = package / "kernels"
    backends = {path.name for path in folder.iterdir() if path.is_dir()}
    assert {"cpu", "gpu", "native", "tpu"} <= backends
    for file in {*folder.glob("*.py")} - {folder / "__init__.py"}:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                found = {*(node.module or "").split("."), *names} & backends
                assert not found, f"{file.name} imports {found}"


def test_every_file_is_in_a_room():
    assert {_room(file) for file in files} - {"__init__"} == set(level)


def _is_text_without_encoding(call):
    """Whether a call reads or writes text in the encoding of the system."""
    keywords = {keyword.arg for keyword in call.keywords}
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if "encoding" in keywords or None in keywords:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    if name in ("run", "Popen") and "text" in keywords:
        return True
    # (Not `interop.open`, which has no mode.)
    modes = [x for x in call.args[:2] + call.keywords if _mode(x) is not None]
    return name == "open" and any("b" not in (_mode(x) or "") for x in modes)


def _mode(argument):
    value = getattr(argument, "value", None)
    value = getattr(value, "value", value)
    is_mode = isinstance(value, str) and value != "" and set(value) <= set("rwaxbt+")
    return value if is_mode else None


def test_text_has_an_encoding():
    found = [
        f"{file.relative_to(package)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and _is_text_without_encoding(node)
    ]
    assert found == []


def test_files_are_short():
    lengths = sorted(len(file.read_text("utf-8").splitlines()) for file in files)
    assert lengths[len(lengths) // 2] < 120
    assert lengths[-1] <= 470


# Nothing that only some people need is imported before they do.
def test_import_is_light():
    code = """
import sys
import equinox
before = set(sys.modules)
import eqquant
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not {"rich", "matplotlib", "argparse"} & new, new
assert "jax.experimental.pallas" not in sys.modules
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("eqquant.")}
later = {"interop", "train", "_report", "_solvers", "_trace"}
later |= {"demo", "bench", "_cli"}
assert not later & rooms, rooms

assert {"interop", "train", "save", "report"} <= {*dir(eqquant)}
from eqquant import straight_through, train
assert train.straight_through is straight_through is eqquant.straight_through
assert "optax" not in sys.modules
assert eqquant.interop.save is eqquant.save
assert not hasattr(eqquant, "training")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
