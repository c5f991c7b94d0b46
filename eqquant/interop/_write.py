import contextlib
import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Iterator
from typing import BinaryIO

import jax
import numpy as np
from jaxtyping import Array

from ._containers import safetensors_layout
from ._replacing import replacing, temporary_path
from ._tensors import ArrayType, is_key, to_tensor
from ._together import (
    agreed,
    from_first_process,
    is_here,
    is_spread,
    is_writer,
    same_everywhere,
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array that is to be written."""

    array: Array | np.ndarray | np.generic
    type: ArrayType
    # Whether its last two axes are to be swapped.
    swapped: bool = False
    # Makes what is written instead of it, at the last moment.
    instead: Callable[[], Array] | None = None


def write(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file, part by part: no array that is split over devices is
    put together in memory. If parts are on devices of other processes, then these have
    to call this too, and each writes its own."""
    types = {name: tensor.type.tensor_type for name, tensor in tensors.items()}
    start, offsets, size = safetensors_layout(types, metadata)
    token = secrets.token_hex(4)
    arrays = [tensor.array for tensor in tensors.values()]
    if not any(map(is_spread, arrays)):
        _check_here(tensors)
        with replacing(path, token) as temporary:
            _begin(temporary, start, size)
            _fill(temporary, tensors, offsets)
        return

    same_everywhere(start, "the arrays of `m`, and what there is to say of them,")
    token = f"{from_first_process(int(token, 16)):08x}"
    written = [x for x, here in zip(tensors.items(), is_writer(arrays)) if here]
    with contextlib.ExitStack() as stack:
        with agreed():
            if jax.process_index() == 0:
                _begin(stack.enter_context(replacing(path, token)), start, size)
        with agreed():
            _fill(temporary_path(path, token), dict(written), offsets)
        with agreed():
            stack.close()


def _check_here(tensors):
    for name, tensor in tensors.items():
        if not is_here(tensor.array):
            raise ValueError(
                f"`{name}` is on devices of another process, which does not know that "
                "this one has others to save. Let that process save it; or place some "
                "array on devices of both, and call `save` in both."
            )


def _begin(path, start, size):
    with open(path, "rb+") as file:
        file.write(start)
        file.truncate(size)


def _fill(path, tensors, offsets):
    with open(path, "wb", opener=_existing) as file:
        for name, tensor in tensors.items():
            _, shape = tensor.type.container
            for index, part in _parts(tensor):
                _write_part(file, offsets[name], shape, index, part)
        file.flush()
        os.fsync(file.fileno())


def _existing(path, flags):
    # Only for writing: so network file systems send what each process wrote, and not
    # whole pages.
    return os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC))


def _parts(tensor: Tensor) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    # Each part that is on devices of this process, and where it is. Once, of those that
    # are copies of each other.
    x = tensor.array if tensor.instead is None else tensor.instead()
    if isinstance(x, jax.Array):
        shards = (jax.random.key_data(x) if is_key(x) else x).addressable_shards
        # Copied there, too, since JAX keeps what it once brought to the host.
        parts = ((s.index, s.data.copy()) for s in shards if s.replica_id == 0)
    else:
        parts = iter([((slice(None),) * x.ndim, x)])
    for index, part in parts:
        part = np.asarray(part)
        if tensor.swapped:
            *lead, i, j = index
            index, part = (*lead, j, i), part.swapaxes(-1, -2)
        yield index, to_tensor(part)


def _write_part(
    file: BinaryIO,
    offset: int,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    part: np.ndarray,
) -> None:
    if part.size == 0:
        return
    starts = [i.indices(size)[0] for i, size in zip(index, shape)]
    starts += [0] * (len(shape) - len(index))
    strides = [math.prod(shape[i + 1 :]) * part.itemsize for i in range(len(shape))]
    offset += sum(start * stride for start, stride in zip(starts, strides))
    # From the last axis on that is split, what belongs together lies together.
    split = [i for i, (a, b) in enumerate(zip(part.shape, shape)) if a != b]
    lead = part.shape[: split[-1]] if split else ()
    offsets = np.asarray(offset)
    for size, stride in zip(lead, strides):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    rows = part.reshape(offsets.size, -1).view(np.uint8)
    for start, row in zip(offsets.reshape(-1), rows):
        file.seek(start)
        file.write(row.data)
