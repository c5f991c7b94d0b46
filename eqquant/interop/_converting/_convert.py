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
from ..._product import Axis
from ...formats import AbstractFormat, as_format, NF4
from .._layouts import NotWritable
from .._open import open
from .._own import gguf_metadata, metadata_file, metadata_name
from .._tensors import for_jax
from ._encode import encode, encoded_struct
from ._output import as_json, beside, check_others, check_out, Output
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
    ordinary: Sequence[str] = (),
    axis: int | Literal["auto"] | Sequence[tuple[Any, Axis]] = "auto",
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
    fit into memory. The codes are bit-identical to [`eqquant.quantize`][], or to
    [`eqquant.tree_quantize`][] if there is a `method`.

    If interrupted, repeat the same call to resume. Unfinished output is in the folder
    `OUT.partial`, and is renamed to `out` when it is complete. If an array cannot be
    converted, the call removes this folder.

    !!! Example

        ```python
        rules = [("lm_head.*", "int8")]
        eqquant.interop.convert("llama", "llama-nf4", "nf4", rules=rules)
        weights = eqquant.load("llama-nf4")
        ```

    **Arguments:**

    - `path`: as in [`eqquant.interop.open`][].
    - `out`: the folder to write, or the file if it ends with `.safetensors` or `.gguf`.
    - `format`: the format of the weights of matrix products, which are recognized by
        names and shapes: matrices, except embeddings and norms. If `None`, only `rules`
        quantize. With `"f32"`, `"f16"` or `"bf16"`, these weights become dense in this
        dtype, and so do all arrays that are quantized in the source.
    - `rules`: as in [`eqquant.Rules`][], or with one of these dtypes as the format.
        They override `format`, `min_size` and `embeddings`. An array whose rule has
        `None` is copied unchanged, quantized or not.
    - `to`: the kind of file to write: `"eqquant"`, for [`eqquant.load`][]; `"gguf"`; or
        a layout of [`eqquant.interop.write`][]. By default `"eqquant"`, or `"gguf"` if
        `out` ends with `.gguf`.
    - `ordinary`: as in [`eqquant.interop.open`][].
    - `axis`: the contracted axis: -1 for matrices of the shape `(out, in)`, or -2 for
        `(in, out)`. If arrays differ, pass pairs of a condition, as in `rules`, and an
        axis, or a tuple of the axes that a convolution contracts; for example
        `[("h.*", -2)]` for GPT-2. The first match decides, and other arrays use
        `"auto"`. `"auto"` keeps the axis of arrays that are quantized in the source.
        Otherwise it is -1, or all axes but the first for the filter of a convolution,
        `(out, in, *window)`. (An array with more than two axes counts as a filter if
        its last axis is shorter than 16. Otherwise, if it has four axes or more, `axis`
        must give its axes.)
    - `min_size`: arrays with fewer numbers are not quantized.
    - `embeddings`: whether to quantize embeddings too.
    - `requantize`: whether to requantize arrays that are quantized in the source. The
        errors add up.
    - `shard_size`: the largest size of a file in bytes. By default 5e9 in a folder.
    - `fresh`: whether to discard the unfinished output of an earlier call.
    - `stats`, `method`: as in [`eqquant.tree_quantize`][]. The paths in `stats` are the
        names of the arrays. (Statistics from [`eqquant.interop.read_imatrix`][] have
        the names of GGUF files.)
    - `config`: for a GGUF file that llama.cpp loads, as in
        [`eqquant.interop.write_gguf`][]. By default, the folder of the source, if its
        `config.json` names an architecture. `False` writes the arrays alone, under
        their own names.
    - `progress`: called with the number of bytes that are done, the total number of
        bytes, and the name of the array.

    **Returns:**

    An [`eqquant.interop.Outcome`][] for each array, with its quantization error.

    **Raises:**

    A `ValueError` if arrays cannot be read, quantized or written, if a rule names an
    array whose axes cannot be determined from its shape, if `stats` describe other
    arrays, if llama.cpp could not run the model, if all arrays to quantize are
    quantized already, or if `OUT.partial` comes from a call with other arguments. A
    `FileExistsError` if `out`, or a file that goes with it, exists, or if `OUT.partial`
    has other files.
    """
    source, out = pathlib.Path(path), pathlib.Path(os.path.abspath(out))
    suffix = out.suffix.lower()
    is_file = suffix in (".safetensors", ".gguf")
    if not is_file:
        # Resolve links, so that the renaming stays within one disk.
        out = pathlib.Path(os.path.realpath(out))
    kind = to or ("gguf" if suffix == ".gguf" else "eqquant")
    check_kind(kind)
    _check_out(out, kind, is_file, shard_size, fresh)
    with open(source, ordinary=ordinary) as checkpoint:
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
    metadata = _metadata(checkpoint)
    name_of_metadata = None
    if metadata and kind == "eqquant":
        name_of_metadata = metadata_name(stem if most is None else None)
    index_name = f"{stem}.safetensors.index.json"
    packed = {n: x for n, x in structs.items() if isinstance(x, QuantizedArray)}
    try:
        aim = target(kind, structs, metadata, index_name, config, name_of_metadata)
        files = shards(aim, structs, stem, most)
    except ValueError as e:
        raise ValueError(f"{e} {_way_out(e, packed, config, kind)}".rstrip()) from e
    found = aim.config({name: x.format for name, x in packed.items()})
    if most is not None:
        others = beside(source, checkpoint.config, found)
    else:
        others = {f"{stem}.config.json": as_json(found)} if found else {}
    if name_of_metadata is not None:
        others[name_of_metadata] = metadata_file(metadata)
    if most is None:
        check_others(out, others)
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


# A format that each kind of file supports, as an example for messages.
_formats = {"gguf": "q8_0", "mlx": "mxfp8", "compressed-tensors": "int8"}


def _way_out(e, packed, config, kind):
    if isinstance(e, NotWritable) and packed.keys() >= set(e.names):
        example = _formats.get(kind)
        formats = {x.format for x in packed.values()}
        is_other = example is not None and as_format(example) not in formats
        if is_other and len(e.names) == len(packed):
            return f"Pass another format, such as {example!r} (--format {example})."
        name = e.pattern
        wide = ", for rows of multiples of 32 numbers" if kind == "gguf" else ""
        format = "q8_0" if kind == "gguf" else "bf16"
        return (
            f"Rules give arrays another format, as ({name!r}, {format!r}) does, or "
            f"--rule '{name}={format}'{wide}. With f32, f16 or bf16, they are dense."
        )
    if config is None:
        return ""
    return (
        "(With `config=False`, or --bare, it becomes a file of arrays alone, which "
        "llama.cpp does not load.)"
    )


def _metadata(checkpoint):
    if checkpoint.kind not in ("gguf", "eqquant"):
        return {}
    found = gguf_metadata(checkpoint.metadata)
    return {k: v for k, v in found.items() if not k.startswith("split.")}


def _config(config, source, checkpoint, kind):
    # Returns the path of the description for llama.cpp, if the output has one.
    if config is False:
        return None
    if config is not None:
        if kind != "gguf":
            raise ValueError(f"`config` is for GGUF files. The output is {kind!r}.")
        return config
    folder = source if source.is_dir() else source.parent
    if kind != "gguf" or checkpoint.kind == "gguf":
        return None
    is_known = checkpoint.config.get("architectures")
    return folder if is_known and (folder / "config.json").is_file() else None


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
        output.fail()
        raise ValueError(f"Could not convert {p.name!r}: {e}") from e
    line = {"name": p.name, "sqnr": sqnr}
    output.write(aim.parts(p.name, x), line)
    return line


def _value(p, solver, dtype, advance) -> tuple[Any, float | None]:
    packed = p.entry.format is not None
    if p.dtype is not None:
        w = p.entry.read().dequantize() if packed else p.entry.numpy()
        return _cast(np.asarray(w), p.dtype), None
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
    if jnp.issubdtype(dtype, jnp.integer):
        return for_jax(x)
    with np.errstate(over="ignore"):
        found = x.astype(dtype)
    if lost := int(np.sum(np.isfinite(x) & ~np.isfinite(found))):
        raise ValueError(
            f"It has numbers that are too large for {dtype.name}: {lost} of {x.size}. "
            "A rule with bf16 or f32 can store them."
        )
    return found


def _struct(p, kind):
    entry = p.entry
    if p.format is not None:
        return encoded_struct(p.format, entry.shape, entry.dtype, p.axis)
    if p.dtype is not None:
        return np.broadcast_to(np.zeros((), p.dtype), entry.shape)
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
    layout = dataclasses.replace(q.layout.side_by_side, row_axis=-2)
    return dataclasses.replace(q, stored=q.layout.to_rows(stored), layout=layout)


def _about(planned, files, solver):
    # Describes everything that determines the output.
    paths = {source.path for p in planned for source in p.entry.sources}
    stats = {path: os.stat(path) for path in sorted(paths)}
    digest = hashlib.sha256()
    for p in planned:
        digest.update(
            json.dumps([p.name, str(p.format), str(p.dtype), p.axis]).encode()
        )
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
    if is_file and (out.suffix.lower() == ".gguf") != (kind == "gguf"):
        raise ValueError(f"{str(out)!r} is not the name of a file for {kind!r}.")
    if is_file and shard_size is not None:
        raise ValueError("`shard_size` is for output to a folder, and `out` is a file.")
    if shard_size is not None and shard_size <= 0:
        raise ValueError(f"`shard_size` should be positive. Got {shard_size}.")
    check_out(out, fresh)
