import os
import pathlib
import time

import pytest


notebooks = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


# Each runs in under two minutes, and ends in a figure: together too long for every run
# of the tests. `EQQUANT_NOTEBOOKS=quick` runs all of them, those that train with fewer
# steps, and `EQQUANT_NOTEBOOKS=full` with all of their steps.
steps = os.environ.get("EQQUANT_NOTEBOOKS")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", notebooks, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    import nbclient
    import nbformat

    if steps is None and path.stem != "quickstart":
        pytest.skip("takes `EQQUANT_NOTEBOOKS=quick` or `full` in the environment")
    monkeypatch.setenv("XLA_FLAGS", "")
    notebook = nbformat.read(path, as_version=4)
    assert all(
        not cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    ), "Notebooks are kept without their outputs."
    if "quick" in notebook.metadata and steps != "full":
        (i,) = [
            i
            for i, cell in enumerate(notebook.cells)
            if "parameters" in cell.metadata.get("tags", [])
        ]
        notebook.cells[i].source = notebook.metadata["quick"]
    start = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert time.monotonic() - start < 300
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for output in code[-1].outputs)


def test_there_is_one():
    assert "quickstart" in [path.stem for path in notebooks]
