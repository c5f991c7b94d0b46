"""What the README and the pages show is what runs, and what they link to is there."""

import csv
import pathlib
import re
from types import ModuleType

import jax
import pytest

import eqquant as eqq
import eqquant.bench
import eqquant.demo
from eqquant._implicit import _table as rules
from eqquant.interop._layouts import layouts
from eqquant.kernels import _table as kernels

from .demo import tiny
from .real_models.files import model_file


root = pathlib.Path(__file__).parents[1]
paths = [root / "README.md", *sorted(root.glob("notebooks/**/*.md"))]
texts = {str(path.relative_to(root)): path.read_text() for path in paths}
readme = texts["README.md"]


def _blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# Recipes enter kernels, rules and layouts into tables of the package.
@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(kernels, "_table", list(kernels._table))
    monkeypatch.setattr(rules, "_rules", {k: [*v] for k, v in rules._rules.items()})
    known = set(layouts)
    yield
    for name in set(layouts) - known:
        del layouts[name]


# The model of the demo, if it is there, or else a tiny one.
@pytest.fixture
def language_model(monkeypatch, tmp_path):
    path = model_file() or tiny.write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(eqquant.demo, "smollm2", lambda: path)
    return path


# Each page is a program, from its first block to its last.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "README.md" else pytest.mark.thorough)
        for name in texts
        if _blocks(texts[name])
    ],
)
def test_code(name, tmp_path, monkeypatch, capsys, tables, language_model):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for block in _blocks(texts[name]):
            exec(compile(block, name, "exec"), names)
    printed = capsys.readouterr().out
    for shown in re.findall(r"^# (\w+\(.*\))$", texts[name], re.MULTILINE):
        assert shown in printed
    if "Int2" in names:
        assert repr(names["w"]).startswith("QuantizedArray(f32[512,512], Int2(")
        assert names["w"].bits_per_weight == 2.5


# From a file to text, in a program of 25 lines that ends with its output.
def test_first_program(capsys, language_model):
    first, *_ = _blocks(texts["notebooks/language_models.md"])
    code, shown = first.split("\n\n# ")
    assert len(code.splitlines()) <= 25
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.startswith("The sky is blue because")
    if "SmolLM2" in str(language_model):
        assert printed == shown.replace("\n# ", " ")


def test_pages_have_code():
    assert sum(len(_blocks(text)) for text in texts.values()) >= 30


# The eight lines that a format takes are eight.
def test_format_is_short():
    text = texts["notebooks/formats.md"]
    (body,) = re.findall(r"^(class Int2.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert len(body.splitlines()) == 8


@pytest.mark.parametrize("name", ("demo", "tests"))
def test_commands_are_one_line(name):
    (command,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)```", readme, re.DOTALL)
    assert len(command.splitlines()) == 1


def test_readme_is_short():
    assert len(readme.splitlines()) <= 220


@pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [_anchor(title) for title in titles], link


def _anchor(title):
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


# The figure shows the ratios that the page prints.
def test_figure_of_speed():
    text = texts["notebooks/measurements.md"]
    table = (root / "notebooks/figures/speed.csv").read_text().splitlines()
    for row in csv.DictReader(table):
        (part,) = re.findall(rf"^x\[{row['rows']}, 4096\].*?\n\n", text, re.M | re.S)
        name = re.escape(row["format"])
        (native,) = re.findall(rf"^{name} +(\d+\.\d\d) ", part, re.M)
        xla = re.findall(rf"^{name}, XLA +(\d+\.\d\d) ", part, re.M)
        xla = xla or re.findall(rf"^{name}, +(\d+\.\d\d) .*\nXLA", part, re.M)
        assert [native, *xla] == [row["native"], row["xla"]]


# So does the other, and the README the losses of formats.
def test_figure_of_loss():
    table = (root / "notebooks/figures/loss.csv").read_text().splitlines()
    found = {}
    for row in csv.DictReader(table):
        cell = f"{float(row['change']):+.3f} ± {float(row['error']):.3f}"
        cell = re.sub(r"\b0\.", ".", cell)
        found.setdefault(row["format"], {})[row["method"]] = cell
    assert len(found) >= 9
    for format, cells in found.items():
        wanted = [cells.get(name, "") for name in ("nearest", "GPTQ", "Sequential")]
        (line,) = _lines_of(format, texts["notebooks/calibrating.md"])
        assert line[1:] == wanted
        (line,) = _lines_of(format, readme)
        assert line[1:3] == [cell.partition(" ")[0] for cell in wanted[:2]]


def _lines_of(format, text):
    """Of tables of formats: bits per weight, and what follows."""
    lines = re.findall(rf"^\| `{re.escape(format)}`(?:, of .*?)? \|(.*)\|$", text, re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [line for line in cells if re.fullmatch(r"\d\.\d\d", line[0])]


# Every public name has a place on the pages of the API.
def test_api_is_complete():
    shown = set(re.findall(r"^::: (eqquant\.\S+)", "\n".join(texts.values()), re.M))
    rooms = (eqq.train, eqq.interop, eqq.formats, eqquant.bench, eqquant.demo)
    missing = {
        f"{room.__name__}.{name}"
        for room in rooms
        for name, thing in vars(room).items()
        if not name.startswith("_")
        and getattr(thing, "__module__", "").startswith("eqquant.")
        and not hasattr(eqq, name)
    }
    public = {name for name in dir(eqq) if getattr(eqq, name).__class__ != ModuleType}
    missing |= {f"eqquant.{name}" for name in public if not name.startswith("_")}
    assert missing - shown == {"eqquant.TYPE_CHECKING"}
