from ._run import run as run
