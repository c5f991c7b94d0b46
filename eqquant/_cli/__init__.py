"""The command `eqquant`: turns command-line arguments into calls of public functions,
and prints their results.

May import every other room, inside functions, so that `--help` is quick. To add a
command, write a file with `add_to(commands)`, which adds a parser and returns it, and
`run(args)`, and list it in `_main.py`.
"""

from ._main import main as main
