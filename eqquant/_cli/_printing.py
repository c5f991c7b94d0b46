import os
import sys


def drop_output() -> None:
    """Discards the output that could not be written. Python would otherwise try again
    when it exits."""
    if sys.stdout is sys.__stdout__:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
