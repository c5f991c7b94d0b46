import contextlib
import dataclasses
import os
from collections.abc import Iterator

from ._candidate import Candidate


# Ends the names of what is measured without the native library, next to the same with
# it.
xla = ", XLA"


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """While this lasts, kernels are chosen as where there is no native library."""
    before = os.environ.get("EQQUANT_NATIVE")
    os.environ["EQQUANT_NATIVE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["EQQUANT_NATIVE"]
        else:
            os.environ["EQQUANT_NATIVE"] = before


def by_xla(candidate: Candidate) -> Candidate:
    """The same product of the same weight, without the native library."""
    return dataclasses.replace(
        candidate,
        kernel=without_native()(candidate.kernel),
        compile=without_native()(candidate.compile),
    )
