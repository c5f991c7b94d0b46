import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from ._eqx_zoo import load_model
from ._parser import add_flag, Parser, user_error
from ._values import as_count


def add_to(commands: Any) -> Parser:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure how well a language model predicts a text, and what it lost",
        description="Perplexity of a model of eqx-zoo (Llama, Qwen 2 and 3), and how "
        "far its predictions are from those of the dense model.",
    )
    evaluate.add_argument(
        "model",
        type=pathlib.Path,
        metavar="MODEL",
        help="a folder of Hugging Face, or a file of GGUF, quantized or not",
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
        help="the model before it was quantized, to compare with",
    )
    evaluate.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FOLDER",
        help="the folder with the config.json, if MODEL does not tell all",
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
    from rich.console import Console
    from rich.text import Text

    from .._report import evaluate

    if args.layers and args.dense is None:
        return user_error("evaluate", "--layers takes a model to compare with, --dense")
    try:
        tokens = read_tokens(args.tokens)
        model = load_model(args.model, args.config)
        dense = None
        if args.dense is not None:
            dense = load_model(args.dense, args.config)
        found = evaluate(_logits, model, _texts(tokens, args.length), dense=dense)
    except (OSError, ValueError) as e:
        return user_error("evaluate", e)
    console = Console()
    console.print(found)
    if args.layers:
        console.print(Text("\nerror after each layer, relative to its outputs", "bold"))
        errors = _errors(model, dense, tokens[: args.length])
        for i, error in enumerate(errors):
            console.print(Text(f"  {i:>3}  {float(error):.3g}"))
    return 0


def read_tokens(path: pathlib.Path) -> Any:
    """The numbers in a file.

    **Raises:**

    A `ValueError` if there are other things in it. An `OSError` if it cannot be read.
    """
    import numpy as np

    if path.suffix == ".npy":
        tokens = np.load(path, allow_pickle=False).reshape(-1)
    else:
        text = path.read_text()
        if text.lstrip().startswith("["):
            tokens = np.asarray(json.loads(text)).reshape(-1)
        else:
            try:
                tokens = np.array([int(x) for x in text.replace(",", " ").split()])
            except ValueError as e:
                raise ValueError(f"{path} should have integers: {e}") from e
    if len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"{path} should have two integers or more. Got {len(tokens)} numbers of "
            f"{tokens.dtype.name}"
        )
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise ValueError(f"{path} should have numbers of tokens, from 0 on")
    return tokens.astype(np.int32)


def _texts(tokens, length) -> Iterator[Any]:
    # The last is filled up, so that one program is compiled.
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
    """How far the outputs of each layer are from those of the dense model."""
    import equinox as eqx
    import jax.numpy as jnp

    from .._implicit import implicit

    def outputs(model, tokens):
        # As `DecoderModel` of eqx-zoo.
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
