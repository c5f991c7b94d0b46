import argparse
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from ._eqx_zoo import load_model
from ._parser import add_flag, Parser, user_error
from ._values import as_count


# The number of the dense model's most probable tokens that are kept when several models
# are compared with it.
_top = 1024


def add_to(commands: Any) -> Parser:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure how well language models predict a text, and how much they lost",
        description="Perplexity of models of eqx-zoo (Llama, Qwen 2 and 3), and how "
        "far their predictions diverge from the dense model's predictions.",
    )
    evaluate.add_argument(
        "models",
        type=pathlib.Path,
        nargs="+",
        metavar="MODEL",
        help="a folder of Hugging Face, or a file of GGUF, quantized or not; several "
        "are compared in a table",
    )
    evaluate.add_argument(
        "tokens",
        type=pathlib.Path,
        metavar="TOKENS",
        help="the numbers of the tokens of a text: a .npy file, or text with integers "
        "between spaces or commas",
    )
    evaluate.add_argument(
        "--dense",
        type=pathlib.Path,
        metavar="MODEL",
        help="the model before it was quantized, to compare with; if there are "
        f"several others, by its {_top} most probable tokens",
    )
    evaluate.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FOLDER",
        help="the folder with the config.json, if MODEL lacks a part of it",
    )
    evaluate.add_argument(
        "--length",
        type=as_count,
        default=512,
        metavar="N",
        help="the number of tokens that the model sees at once (default: %(default)s)",
    )
    add_flag(evaluate, "--layers", "also print the error after each layer")
    return evaluate


def run(args: argparse.Namespace) -> int:
    from .._report import evaluate, predictions

    if args.layers and args.dense is None:
        return user_error("evaluate", "--layers takes a model to compare with, --dense")
    try:
        tokens = read_tokens(args.tokens)
        largest = int(tokens.max())
        texts = list(_texts(tokens, args.length))
        dense = others = None
        if args.dense is not None:
            dense = others = load_model(args.dense, args.config, largest)
            if len(args.models) > 1:
                others = predictions(_logits, dense, texts, top=_top)
                dense = dense if args.layers else None
        found, layers = {}, {}
        for path in args.models:
            model = load_model(path, args.config, largest)
            found[path] = evaluate(_logits, model, texts, dense=others)
            if args.layers:
                layers[path] = _errors(model, dense, tokens[: args.length])
    except (OSError, ValueError) as e:
        return user_error("evaluate", e)
    _print(found, layers)
    return 0


def _print(found, layers):
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if len(found) == 1:
        console.print(*found.values())
    else:
        tokens = next(iter(found.values())).tokens
        console.print(_table(found))
        console.print(Text(f"Losses are in nats per token, of {tokens:,} tokens."))
    for path, errors in layers.items():
        of = "" if len(layers) == 1 else f" of {path}"
        title = f"\nerror after each layer{of}, relative to its outputs"
        console.print(Text(title, "bold"))
        for i, error in enumerate(errors):
            console.print(Text(f"  {i:>3}  {float(error):.3g}"))


def _table(found):
    from rich.table import Table

    evaluations = list(found.values())
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    compared = evaluations[0].dense_loss is not None
    of_dense = ("change", "divergence", "same favourite") if compared else ()
    for name in ("loss", "perplexity", *of_dense):
        table.add_column(name, justify="right")
    if compared:
        dense = evaluations[0].dense_loss
        table.add_row("(dense)", f"{dense:.4f}", f"{math.exp(dense):.4g}")
    for path, one in found.items():
        row = [str(path), f"{one.loss:.4f}", f"{one.perplexity:.4g}"]
        if compared:
            row.append(f"{one.change:+.4f} ± {one.change_error:.4f}")
            row += [f"{one.divergence:.4f}", f"{one.agreement:.1%}"]
        table.add_row(*row)
    return table


def read_tokens(path: pathlib.Path) -> Any:
    """Reads the token numbers in a file. Raises a `ValueError` if it holds anything
    else. Raises an `OSError` if it cannot be read."""
    import numpy as np

    if path.suffix == ".npy":
        # (A header may claim more numbers than there are.)
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
        except (EOFError, ValueError) as e:
            raise ValueError(f"{path} is damaged: {e}") from e
    else:
        try:
            tokens = _tokens_of_text(path.read_text(encoding="utf-8"))
        except (RecursionError, ValueError) as e:
            raise ValueError(f"{path} should have integers: {e}") from e
    if len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"{path} should have two integers or more. Got {len(tokens)} numbers of "
            f"{tokens.dtype.name}"
        )
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise ValueError(f"{path} should have numbers of tokens, from 0 on")
    return tokens.astype(np.int32)


def _tokens_of_text(text):
    import numpy as np

    if text.lstrip().startswith("["):
        return np.asarray(json.loads(text)).reshape(-1)
    return np.array([int(x) for x in text.replace(",", " ").split()])


def _texts(tokens, length) -> Iterator[Any]:
    # The last text is padded to the same length, so that only one program is compiled.
    import numpy as np

    length = min(length, len(tokens))
    for start in range(0, len(tokens), length):
        part = tokens[start : start + length]
        counts = np.arange(length) < len(part)
        yield np.pad(part, (0, length - len(part)))[None], counts[None]


def _logits(model, tokens):
    from .._implicit import implicit

    return implicit(lambda model, tokens: model(tokens)[0])(model, tokens[0])[None]


def _errors(model, dense, tokens):
    """Returns the relative error of the outputs of each layer."""
    import equinox as eqx
    import jax.numpy as jnp

    from .._implicit import implicit

    def outputs(model, tokens):
        # Repeats `DecoderModel` of eqx-zoo, but keeps the outputs of each layer.
        places = jnp.arange(len(tokens))
        mask = places[None, :] <= places[:, None]
        x, found = model.model.embed_tokens.weight[tokens], []
        for layer in model.model.layers:
            x, _ = layer(x, places, mask)
            found.append(x)
        return found

    @eqx.filter_jit
    def errors(model, dense, tokens):
        both = [implicit(outputs)(m, tokens) for m in (model, dense)]
        norm = jnp.linalg.norm
        return [norm(x - y) / norm(y) for x, y in zip(*both, strict=True)]

    return errors(model, dense, jnp.asarray(tokens))
