import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TYPE_CHECKING

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray
from ...formats import AbstractFormat, NF4
from .._open import open
from ._encode import encode, encoded_struct
from ._output import as_json, beside, is_placed, is_there, Output
from ._plan import Outcome, outcome, plan, Planned
from ._shards import index_of, shards
from ._targets import check_kind, target


if TYPE_CHECKING:
    from ..._solvers import AbstractMethod
    from ..._trace import Statistics


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: AbstractFormat | str | None = NF4(),
    *,
    rules: Sequence[tuple[Any, Any]] = (),
    to: str | None = None,
    axis: int | Sequence[tuple[Any, int]] = -1,
    min_size: int = 1024,
    embeddings: bool = False,
    requantize: bool = False,
    shard_size: int | None = None,
    fresh: bool = False,
    stats: "Statistics | None" = None,
    method: "AbstractMethod | None" = None,
    config: str | os.PathLike[str] | Literal[False] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Outcome]:
    """Quantizes a model from files to files, one array at a time, so that it need not
    fit into memory. The codes are those of [`eqquant.quantize`][], bit for bit; with a
    `method`, those of [`eqquant.tree_quantize`][].

    If interrupted, repeat the same call to resume. Unfinished output is in the folder
    `OUT.partial`, and is renamed to `out` when it is complete.

    !!! Example

        ```python
        rules = [("lm_head.*", "int8")]
        eqquant.interop.convert("llama", "llama-nf4", "nf4", rules=rules)
        weights = eqquant.load("llama-nf4")
        ```

    **Arguments:**

    - `path`: as for [`eqquant.interop.open`][].
    - `out`: the folder to write, or the file if it ends with `.safetensors` or `.gguf`.
    - `format`: of the weights of matrix products, as far as names and shapes tell:
        matrices, except embeddings and norms. If `None`, only `rules` quantize.
    - `rules`: as for [`eqquant.Rules`][]. They override `format`, `min_size` and
        `embeddings`.
    - `to`: what to write: `"eqquant"`, for [`eqquant.load`][]; `"gguf"`; or a layout of
        [`eqquant.interop.write`][]. By default the first, unless `out` ends with
        `.gguf`.
    - `axis`: the contracted axis: -1 for matrices of the shape `(out, in)`. If arrays
        differ, pairs of a condition, as in `rules`, and an axis; for GPT-2,
        `[("h.*", -2)]`. The first match decides; other arrays have -1.
    - `min_size`: arrays with fewer numbers are not quantized.
    - `embeddings`: whether to quantize embeddings too.
    - `requantize`: whether to quantize arrays again that are quantized in the source.
        The errors add up.
    - `shard_size`: the largest size of a file in bytes. By default 5e9 in a folder.
    - `fresh`: whether to discard the unfinished output of an earlier call.
    - `stats`, `method`: as of [`eqquant.tree_quantize`][]. The paths in `stats` are the
        names of the arrays: those that [`eqquant.interop.read_imatrix`][] reads are the
        names of GGUF files.
    - `config`: for a GGUF file that llama.cpp loads, as for
        [`eqquant.interop.write_gguf`][]. By default it is the folder of a source whose
        `config.json` names an architecture. `False` writes the arrays alone, under the
        names that they have.
    - `progress`: called with the number of bytes that are done, that of all bytes, and
        the name of the array.

    **Returns:**

    An [`eqquant.interop.Outcome`][] for each array, with its quantization error.

    **Raises:**

    A `ValueError` if an array cannot be read, quantized or written, if `stats` are of
    other arrays, if llama.cpp could not run the model, or if `OUT.partial` is from a
    call with other arguments. A `FileExistsError` if `out` exists, or if `OUT.partial`
    has other files.
    """
    source, out = pathlib.Path(path), pathlib.Path(os.path.abspath(out))
    is_file = out.suffix in (".safetensors", ".gguf")
    kind = to or ("gguf" if out.suffix == ".gguf" else "eqquant")
    check_kind(kind)
    _check_out(out, kind, is_file, shard_size, fresh)
    with open(source) as checkpoint:
        planned = plan(
            checkpoint, format, rules, axis, min_size, embeddings, requantize
        )
        solver = None
        if stats is not None or method is not None:
            # (Imported here, so that `eqquant.load` is quick.)
            from ._solve import Solver

            solver = Solver(planned, stats, method)
        return _converted(
            checkpoint,
            source,
            out,
            planned,
            solver,
            kind,
            _config(config, source, checkpoint, kind),
            out.stem if is_file else "model",
            None if is_file else shard_size or 5 * 10**9,
            fresh,
            progress or (lambda done, total, name: None),
        )


def _converted(
    checkpoint, source, out, planned, solver, kind, config, stem, most, fresh, progress
):
    structs = {p.name: _struct(p, kind) for p in planned}
    metadata = checkpoint.metadata if checkpoint.kind == "gguf" else {}
    index_name = f"{stem}.safetensors.index.json"
    try:
        aim = target(kind, structs, metadata, index_name, config)
    except ValueError as e:
        if config is None:
            raise
        raise ValueError(
            f"{e} (With `config=False`, or --bare, it becomes a file of arrays alone, "
            "which llama.cpp does not load.)"
        ) from e
    files = shards(aim, structs, stem, most)
    packed = {n: x for n, x in structs.items() if isinstance(x, QuantizedArray)}
    found = aim.config({name: x.format for name, x in packed.items()})
    if most is not None:
        others = beside(source, checkpoint.config, found)
    else:
        others = {f"{stem}.config.json": as_json(found)} if found else {}
    index = index_of(aim, files)
    if index is not None:
        others[index_name] = index.encode()
    total = sum(p.entry.nbytes for p in planned)
    about = _about(planned, files, solver)
    with Output(out, most is None, files, about, fresh) as output:
        done = sum(p.entry.nbytes for p in planned if p.name in output.lines)
        progress(done, total, "")
        outcomes = []
        for p in planned:
            line = output.lines.get(p.name)
            if line is None:
                advance = _Advance(progress, done, total, p)
                line = _write(p, solver, aim, output, structs[p.name], advance)
                done += p.entry.nbytes
                progress(done, total, p.name)
            nbytes = sum(x.nbytes for x in aim.parts(p.name, structs[p.name]).values())
            outcomes.append(outcome(p, nbytes, line["sqnr"]))
        output.finish(others)
    return outcomes


def _config(config, source, checkpoint, kind):
    # Where the description for llama.cpp is, if the output has one.
    if config is False:
        return None
    if config is not None:
        if kind != "gguf":
            raise ValueError(f"`config` is for GGUF files. The output is {kind!r}.")
        return config
    folder = source if source.is_dir() else source.parent
    is_known = checkpoint.config.get("architectures") and checkpoint.kind != "gguf"
    is_there = is_known and (folder / "config.json").is_file()
    return folder if is_there and kind == "gguf" else None


class _Advance:
    """Reports the share of an array that is done."""

    def __init__(self, progress, done, total, planned):
        self._progress, self._done, self._total = progress, float(done), total
        self._planned = planned

    def __call__(self, share: float) -> None:
        self._done += share * self._planned.entry.nbytes
        self._progress(int(self._done), self._total, self._planned.name)


def _write(p: Planned, solver, aim, output, struct, advance):
    try:
        x, sqnr = _value(p, solver, struct.dtype, advance)
    except ValueError as e:
        raise ValueError(f"Could not convert {p.name!r}: {e}") from e
    line = {"name": p.name, "sqnr": sqnr}
    output.write(aim.parts(p.name, x), line)
    return line


def _value(p, solver, dtype, advance) -> tuple[Any, float | None]:
    packed = p.entry.format is not None
    if p.format is None:
        return _rows(p.entry.read()) if packed else _cast(p.entry.numpy(), dtype), None
    w = np.asarray(p.entry.read().dequantize()) if packed else p.entry.numpy()
    if solver is not None and solver.takes(p):
        q, sqnr = solver(w, p)
        advance(1.0)
        return _rows(q), sqnr
    q, error = encode(w, p.format, p.axis, advance)
    return q, error.sqnr


def _cast(x, dtype):
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(dtype, jnp.integer) and np.any(x.astype(dtype) != x):
        raise ValueError(
            "It has integers of 64 bits. Set `JAX_ENABLE_X64=1`, or call this inside "
            "`with jax.enable_x64(True):`."
        )
    return x.astype(dtype)


def _struct(p, kind):
    entry = p.entry
    if p.format is not None:
        return encoded_struct(p.format, entry.shape, entry.dtype, p.axis)
    if entry.format is None:
        # JAX converts 64-bit numbers to 32 bits, unless these are enabled.
        dtype = entry.dtype
        dtype = jax.dtypes.canonicalize_dtype(dtype) if kind == "eqquant" else dtype
        return np.broadcast_to(np.zeros((), dtype), entry.shape)
    struct = entry.struct()
    zeros = lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape)
    return _rows(struct, jtu.tree_map(zeros, struct.stored))


def _rows(q: QuantizedArray, stored: Any = None) -> QuantizedArray:
    stored = jtu.tree_map(np.asarray, q.stored) if stored is None else stored
    layout = dataclasses.replace(q.layout, row_axis=-2, panels=False)
    return dataclasses.replace(q, stored=q.layout.to_rows(stored), layout=layout)


def _about(planned, files, solver):
    # Everything that determines the output.
    paths = {source.path for p in planned for source in p.entry.sources}
    stats = {path: os.stat(path) for path in sorted(paths)}
    digest = hashlib.sha256()
    for p in planned:
        digest.update(json.dumps([p.name, str(p.format), p.axis]).encode())
    if solver is not None:
        digest.update(solver.digest().encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.layout.header)
    return {
        "files": [
            [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
            for path, stat in stats.items()
        ],
        "options": digest.hexdigest(),
        "versions": jax.__version__,
    }


def _check_out(out, kind, is_file, shard_size, fresh):
    if is_file and (out.suffix == ".gguf") != (kind == "gguf"):
        raise ValueError(f"{str(out)!r} is not the name of a file for {kind!r}.")
    if is_file and shard_size is not None:
        raise ValueError("`shard_size` is for output to a folder, and `out` is a file.")
    if shard_size is not None and shard_size <= 0:
        raise ValueError(f"`shard_size` should be positive. Got {shard_size}.")
    if is_there(out) and (fresh or not is_placed(out)):
        raise FileExistsError(f"{str(out)!r} already exists.")
