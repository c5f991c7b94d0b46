import contextlib
import itertools as it
import math
import os
import secrets
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from .._containers import safetensors_layout
from .._replacing import replacing, temporary_path
from .._tensors import ArrayType, is_key, to_tensor
from ._together import (
    agreed,
    from_first_process,
    is_here,
    is_spread,
    is_writer,
    same_everywhere,
)


class Tensor(NamedTuple):
    """An array to write, and its type in the file."""

    array: Any
    type: ArrayType


def write(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file shard by shard, without gathering sharded arrays in
    memory. If arrays are sharded over several processes, all of these must call this
    function, and each writes its own shards."""
    types = {name: tensor.type.tensor_type for name, tensor in tensors.items()}
    arrays = [tensor.array for tensor in tensors.values()]
    start, offsets, size = safetensors_layout(types, metadata)
    token = secrets.token_hex(4)
    if not any(map(is_spread, arrays)):
        _check_here(tensors)
        with replacing(path, token) as temporary:
            _begin(temporary, start, size)
            _fill(temporary, tensors, offsets)
        return

    same_everywhere(start, "the arrays of `m` and their descriptions")
    token = f"{from_first_process(int(token, 16)):08x}"
    written = dict(it.compress(tensors.items(), is_writer(arrays)))
    with contextlib.ExitStack() as stack:
        with agreed():
            if jax.process_index() == 0:
                _begin(stack.enter_context(replacing(path, token)), start, size)
        with agreed():
            _fill(temporary_path(path, token), written, offsets)
        with agreed():
            stack.close()


def _check_here(tensors):
    for name, tensor in tensors.items():
        if not is_here(tensor.array):
            raise ValueError(
                f"`{name}` is on devices of another process. Call `save` in that "
                "process; or, to save one file from both, shard some array over the "
                "devices of both and call `save` in both."
            )


def _begin(path, start, size):
    with open(path, "rb+") as file:
        file.write(start)
        file.truncate(size)


def _fill(path, tensors, offsets):
    with open(path, "wb", opener=_existing) as file:
        for name, tensor in tensors.items():
            _, shape = tensor.type.container
            for index, part in _shards(tensor.array):
                _write_part(file, offsets[name], shape, index, part)
        file.flush()
        os.fsync(file.fileno())


def _existing(path, flags):
    # Opens a file for writing only: network file systems then send just the bytes that
    # each process wrote, and not whole pages.
    return os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC))


def _shards(x: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    # Yields the shards on devices of this process, one of each set of replicas, and
    # their places in the array.
    if not isinstance(x, jax.Array):
        yield (slice(None),) * x.ndim, to_tensor(np.asarray(x))
        return
    for shard in (jax.random.key_data(x) if is_key(x) else x).addressable_shards:
        if shard.replica_id == 0:
            # Read a copy, because JAX caches the host's copy of an array. (`.copy()`
            # would compile a program for each shape.)
            data = shard.data
            copied = jax.device_put(data, data.sharding, may_alias=False)
            yield shard.index, to_tensor(np.asarray(copied))


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
    # The bytes of a shard are contiguous from the last split axis on.
    split = [i for i, (a, b) in enumerate(zip(part.shape, shape)) if a != b]
    lead = part.shape[: split[-1]] if split else ()
    offsets = np.asarray(offset)
    for size, stride in zip(lead, strides):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    rows = part.reshape(offsets.size, -1).view(np.uint8)
    for start, row in zip(offsets.reshape(-1), rows):
        file.seek(start)
        file.write(row.data)
