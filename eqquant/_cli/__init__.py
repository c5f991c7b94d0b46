"""The command `eqquant`: command-line arguments become calls of the public functions,
and their results are printed.
"""

from ._main import main as main
