import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


# Communication between processes. All of them must call each of these functions, except
# `is_spread` and `is_here`.


def is_spread(x: Any) -> bool:
    """Whether an array is on the devices of several processes. All processes get the
    same answer."""
    if is_here(x):
        return False
    if len(x.sharding.addressable_devices) > 0:
        return True
    return len({device.process_index for device in x.sharding.device_set}) > 1


def is_here(x: Any) -> bool:
    """Whether the whole array is on devices of this process."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def everywhere(x: np.ndarray) -> np.ndarray:
    """Gathers the arrays of all processes, along a new first axis."""
    return np.asarray(multihost_utils.process_allgather(x))


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Waits until the block has ended in every process. If it fails in one, it fails in
    all, so that no process waits forever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        (where,) = np.nonzero(everywhere(np.asarray(failed)))
    if where.size > 0:
        raise RuntimeError(
            f"The processes {where.tolist()} could not write the file: see their "
            "errors. All processes should see the same folder."
        )


def same_everywhere(text: bytes, what: str) -> None:
    """Checks that all processes have the same text. Raises a `ValueError` in every
    process if the texts differ."""
    checksums = everywhere(np.asarray(zlib.crc32(text), np.uint32))
    if np.any(checksums != checksums[0]):
        raise ValueError(f"{what} should be the same in all processes.")


def from_first_process(number: int) -> int:
    """Returns the 32-bit number that the first process passed."""
    return int(everywhere(np.asarray(number, np.uint32))[0])


def is_writer(arrays: Sequence[Any]) -> list[bool]:
    """Returns for each array whether this process writes its shards. If an array is
    spread over processes, all of them do; otherwise, the first process that has the
    whole array writes it."""
    whole = everywhere(np.asarray([is_here(x) for x in arrays]))
    first = np.argmax(whole, axis=0) == jax.process_index()
    return (first | ~whole.any(axis=0)).tolist()
