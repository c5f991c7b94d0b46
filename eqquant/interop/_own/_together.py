import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


# What several processes do at the same time. Each function is to be called by all.


def is_spread(x: Any) -> bool:
    """Whether an array is on devices of several processes. This is true in all of them,
    and in others, or in none."""
    if is_here(x):
        return False
    if len(x.sharding.addressable_devices) > 0:
        return True
    return len({device.process_index for device in x.sharding.device_set}) > 1


def is_here(x: Any) -> bool:
    """Whether this process has an array as a whole."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def everywhere(x: np.ndarray) -> np.ndarray:
    """What each process gives, along a new first axis."""
    return np.asarray(multihost_utils.process_allgather(x))


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Ends when the block has ended in every process. If it fails in one then it fails
    in all, so that none waits for another forever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        (where,) = np.nonzero(everywhere(np.asarray(failed)))
    if where.size > 0:
        raise RuntimeError(
            f"The file could not be written by the processes {where.tolist()}, which "
            "tell the reason. All of them should have the same folder."
        )


def same_everywhere(text: bytes, what: str) -> None:
    """Checks that all processes have the same text.

    **Raises:**

    A `ValueError` in each of them if they have not.
    """
    checksums = everywhere(np.asarray(zlib.crc32(text), np.uint32))
    if np.any(checksums != checksums[0]):
        raise ValueError(f"{what} should be the same in all processes.")


def from_first_process(number: int) -> int:
    """A 32-bit number, as the first process has it."""
    return int(everywhere(np.asarray(number, np.uint32))[0])


def is_writer(arrays: Sequence[Any]) -> list[bool]:
    """Whether this process is the one to write its part of each array: its own part of
    one that is spread over processes; and of one that some process has as a whole, the
    first such process does."""
    whole = everywhere(np.asarray([is_here(x) for x in arrays]))
    first = np.argmax(whole, axis=0) == jax.process_index()
    return (first | ~whole.any(axis=0)).tolist()
