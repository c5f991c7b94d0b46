"""What weights lose by an importance matrix of llama.cpp's own making: `python -m
tests.llama_cpp.imatrix TOOLS FOLDER OUT [SAMPLE]`. TOOLS has `llama-imatrix` and
`llama-quantize`, FOLDER is a model of `make.py`, OUT is for files of GGUF. It prints,
for each type, the error of this package over that of `llama-quantize`: squares of
errors, each weighted by the mean square of its input. SAMPLE is where to write some
rows of weights, and the blocks that `llama-quantize` makes of them."""

import pathlib
import subprocess
import sys

import gguf
import numpy as np

import eqquant as eqq
from eqquant import interop


types = {
    "q2_k": "q2_k",
    "q3_k": "q3_k_s",
    "q4_k": "q4_k_s",
    "q5_k": "q5_k_s",
    "q6_k": "q6_k",
    "q4_0": "q4_0",
    "iq4_nl": "iq4_nl",
    "iq4_xs": "iq4_xs",
}
_sampled = ("blk.0.attn_q.weight", "blk.1.attn_output.weight", "blk.2.ffn_down.weight")
_rows = 8


def main(tools, folder, out, sample=None):
    tools, out = pathlib.Path(tools).resolve(), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    dense, text = out / "model.gguf", out / "text.txt"
    interop.write_gguf(dense, interop.open(folder), config=folder)
    source = [pathlib.Path(module.__file__) for module in (subprocess, pathlib)]
    text.write_text("\n".join(path.read_text() for path in source))
    for name in ("imatrix.gguf", "imatrix.dat"):
        kind = name.split(".")[1]
        options = ["-c", "128", "-b", "128", "-ub", "128", "--chunks", "20", "-t", "2"]
        options += ["--no-ppl", "--process-output", "--output-format", kind]
        # (The name of the text is written into the file.)
        files = ["-m", dense.name, "-f", text.name, "-o", name]
        _run(tools / "llama-imatrix", *files, *options, cwd=out)
    stats = interop.read_imatrix(out / "imatrix.gguf")
    weights = interop.open(dense)
    kept = {f"{name}.w": np.asarray(weights[name][:_rows]) for name in _sampled}
    for type, named in types.items():
        theirs, ours = out / f"theirs.{type}.gguf", out / f"ours.{type}.gguf"
        imatrix = ["--imatrix", out / "imatrix.gguf"]
        _run(tools / "llama-quantize", "--pure", *imatrix, dense, theirs, named)
        how = {"stats": stats, "method": eqq.ScaleSearch(), "min_size": 0}
        interop.convert(dense, ours, type, **how)
        blocks = [_blocks(path) for path in (ours, theirs)]
        ratios = []
        for name in stats:
            w, weight = np.asarray(weights[name], np.float64), stats[name].diagonal
            errors = [_error(w, each[name], np.asarray(weight)) for each in blocks]
            assert all(each[name].tensor_type.name == type.upper() for each in blocks)
            ratios.append(errors[0] / errors[1])
        for name in _sampled:
            kept[f"{name}.{type}"] = np.array(blocks[1][name].data[:_rows])
        print(f"{type} {np.median(ratios):.4f} {max(ratios):.4f} {len(ratios)}")
    if sample is not None:
        sample = pathlib.Path(sample)
        np.savez_compressed(sample.with_suffix(".npz"), **kept)
        for kind in (".gguf", ".dat"):
            data = (out / f"imatrix{kind}").read_bytes()
            sample.with_suffix(kind).write_bytes(data)


def _blocks(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def _error(w, tensor, weight):
    found = gguf.dequantize(tensor.data, tensor.tensor_type)
    return np.sum((found.astype(np.float64) - w) ** 2 * weight)


def _run(*args, cwd=None):
    command = list(map(str, args))
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


if __name__ == "__main__":
    main(*sys.argv[1:])
