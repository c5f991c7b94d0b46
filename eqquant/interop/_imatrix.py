import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._trace import Statistics
from ._containers import Cursor, gguf_magic, MappedFile, open_container
from ._renaming import renamed
from ._write_to import write_gguf


_sums, _counts = ".in_sum2", ".counts"
# The default number of tokens in a chunk of `llama-imatrix`.
_rows_of_chunk = 512
_most_entries = 2**16


def read_imatrix(
    path: str | os.PathLike[str],
    rename: Any = None,
    *,
    axis: int = -1,
    chunk_size: int = _rows_of_chunk,
) -> Statistics:
    """Reads an importance matrix of llama.cpp: the mean squares of the inputs of each
    weight, which are diagonals of Gram matrices.

    !!! Example

        ```python
        stats = eqquant.interop.read_imatrix("imatrix.gguf", rename="llama")
        model = eqquant.tree_quantize(
            model, "q4_k", stats=stats, method=eqquant.ScaleSearch()
        )
        ```

    **Arguments:**

    - `path`: a file of `llama-imatrix`, in GGUF or in the older format (`.dat`).
    - `rename`: rules from the names in the file, such as `"blk.0.attn_q.weight"`, to
        the paths of a model, as in [`eqquant.interop.load_into`][].
    - `axis`: the axis of the weights that products contract: -1 for `(out, in)`
        matrices, -2 for `(in, out)`.
    - `chunk_size`: the number of tokens in a chunk, which is the context that
        `llama-imatrix` ran with (`-c`). Files in the older format count chunks, and do
        not store their size. GGUF files count tokens, so `chunk_size` is ignored. It
        scales the `rows` of an [`eqquant.Gram`][], not the means. So it matters if a
        file is added to other statistics, or if there were fewer rows than inputs: such
        statistics are given less weight, with a warning.

    **Returns:**

    An [`eqquant.Statistics`][]. Each expert of a layer has its own diagonal. If a
    weight or an expert saw no data, all its inputs get the same importance.

    **Raises:**

    A `ValueError` if the file is not an importance matrix, or is damaged.
    """
    if axis not in (-1, -2):
        raise ValueError(f"`axis` should be -1 or -2. Got {axis!r}.")
    if chunk_size < 1:
        raise ValueError(
            f"`chunk_size` should be a positive number of tokens. Got {chunk_size!r}."
        )
    found = {}
    for name, (sums, counts) in _read(path, chunk_size).items():
        bad = not np.all(np.isfinite(sums)) or np.any(sums < 0)
        if bad or not np.all(np.isfinite(counts)) or np.any(counts < 0):
            raise _error(
                path, f"{name!r} should have sums of squares of finite numbers."
            )
        unseen = counts == 0
        sums = np.where(unseen[:, None], 1, sums)
        counts = np.where(unseen, 1, counts)
        for new in renamed(name, rename):
            found[new] = sums, counts
    values, rows, places = [], [], []
    for i, (name, (sums, counts)) in enumerate(found.items()):
        experts, k = sums.shape
        # One expert is a matrix, several are a stack of matrices.
        lead = (1,) if experts == 1 else (experts, 1)
        contracted = len(lead) + 1 + axis
        values.append(jnp.asarray(sums.reshape(*lead, k), jnp.float32))
        rows.append(jnp.asarray(counts.reshape(lead), jnp.float32))
        places.append((name, (contracted,), i))
    return Statistics(tuple(values), tuple(rows), tuple(places))


def write_imatrix(
    path: str | os.PathLike[str],
    stats: Statistics,
    rename: Any = None,
    *,
    datasets: tuple[str, ...] | list[str] = (),
) -> None:
    """Writes the diagonals of statistics as an importance matrix for `llama-quantize`,
    in a GGUF file.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        eqquant.interop.write_imatrix("imatrix.gguf", stats, rename="llama")
        ```

    **Arguments:**

    - `path`: the file. An existing file is replaced atomically.
    - `stats`: statistics of matrices, and of stacks of experts.
    - `rename`: rules from paths to the names in the file, as in
        [`eqquant.interop.write_gguf`][].
    - `datasets`: the names of the data sets, to store in the file.

    **Raises:**

    A `ValueError` if a weight is contracted along several axes, or is neither a matrix
    nor a stack of matrices.
    """
    tensors: dict[str, np.ndarray] = {}
    most = 0.0
    for name in stats:
        try:
            gram = stats[name]
        except KeyError as e:
            raise ValueError(f"`stats` cannot be written: {e.args[0]}") from e
        lead = gram.rows.shape
        if len(gram.contracted) != 1 or len(lead) not in (1, 2) or lead[-1] != 1:
            raise ValueError(
                "`stats` should be of matrices, and of stacks of them, with one Gram "
                f"for each. Got {lead} of `{name}`."
            )
        experts = int(np.prod(lead))
        sums = np.asarray(gram.diagonal, np.float32).reshape(experts, -1)
        counts = np.asarray(gram.rows, np.float32).reshape(experts, 1)
        most = max(most, float(counts.max()))
        for new in renamed(name, rename, inverse=True):
            tensors |= {new + _sums: sums, new + _counts: counts}
    metadata = {
        "general.type": "imatrix",
        "imatrix.chunk_count": np.uint32(max(1, round(most / _rows_of_chunk))),
        "imatrix.chunk_size": np.uint32(_rows_of_chunk),
    }
    if datasets:
        metadata["imatrix.datasets"] = list(datasets)
    write_gguf(path, tensors, metadata)


def _read(path, chunk_size) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    # Reads the sums of squares of each tensor, and the numbers of rows, of shapes `e k`
    # and `e`.
    file = MappedFile(path)
    try:
        if file.start(4) != gguf_magic:
            return _read_old(path, file, chunk_size)
    finally:
        file.close()
    container = open_container(path)
    try:
        if container.metadata.get("general.type") != "imatrix":
            raise _error(path, "it is a GGUF file, but not an importance matrix.")
        return _of_tensors(path, container.tensors)
    finally:
        container.close()


def _of_tensors(path, tensors):
    found = {}
    for key, tensor in tensors.items():
        if not key.endswith(_sums):
            continue
        name = key.removesuffix(_sums)
        counts = tensors.get(name + _counts)
        if counts is None:
            raise _error(path, f"{name!r} should have counts.")
        sums, counts = (
            np.array(a.read(), np.float32) if a.kind == "F32" else None
            for a in (tensor, counts)
        )
        if sums is None or counts is None or sums.ndim not in (1, 2) or not sums.size:
            raise _error(path, f"{name!r} should have a matrix of float32 numbers.")
        sums, counts = np.atleast_2d(sums), counts.ravel()
        if counts.size != len(sums):
            raise _error(
                path,
                f"{name!r} should have {len(sums)} counts. Got {counts.size}.",
            )
        found[name] = sums, counts
    if not found:
        raise _error(path, "it has no sums of squares.")
    return found


def _read_old(path, file, chunk_size):
    # The older format stores means of squares times the number of chunks, and this
    # number.
    cursor = Cursor(file.map(0, file.size).data if file.size else memoryview(b""))
    found = {}
    try:
        number = _int(cursor, "its number of entries", 1, _most_entries)
        for _ in range(number):
            length = _int(cursor, "the length of a name", 1, 2**16)
            try:
                name = bytes(cursor.take(length, "a name")).decode()
            except UnicodeDecodeError as e:
                raise ValueError(
                    "not an importance matrix: the name of an entry is not text."
                ) from e
            chunks = _int(cursor, f"the number of chunks of {name!r}", 0, 2**31 - 1)
            size = _int(cursor, f"the number of values of {name!r}", 1, 2**31 - 1)
            data = cursor.take(4 * size, f"the values of {name!r}")
            values = np.frombuffer(data, "<f4").astype(np.float32)
            if "_exps" in name:
                warnings.warn(
                    f"{name!r} is left out: this older kind of file does not say how "
                    "many experts there are. `llama-imatrix` writes GGUF, too.",
                    stacklevel=4,
                )
                continue
            rows = np.float32(chunks * chunk_size)
            found[name] = values[None] * np.float32(chunk_size), np.full(1, rows)
    except ValueError as e:
        raise _error(path, str(e)) from e
    return found


def _int(cursor, what, least, most):
    value = cursor.uint32(what)
    if not least <= value <= most:
        raise ValueError(
            "it is not an importance matrix of llama.cpp, or damaged: "
            f"{what} should be from {least} to {most}. Got {value}."
        )
    return value


def _error(path, what):
    return ValueError(f"Could not open {os.fspath(path)!r}: {what}")
