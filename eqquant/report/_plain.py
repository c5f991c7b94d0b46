import io
import shutil
from typing import Any


def plain(renderable: Any) -> str:
    """What rich prints, without colours, as wide as the terminal."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns
    # (Of text, in a notebook too.)
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_jupyter=False
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
