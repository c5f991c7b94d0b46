import json
import pathlib
import shutil
import tempfile

import jax.numpy as jnp
import numpy as np

import eqquant as eqq
from eqquant import interop

from ..interop import files
from ..interop.killed import killed
from ..interop.same import same
from .case import Case


_half = jnp.float16
_writers = {
    "mlx": (eqq.Int(4, 32, offset="minimum"), eqq.Int(8, 64, offset="minimum")),
    "gptq": (eqq.Int4(32, scale_dtype=_half), eqq.Int(2, 32, scale_dtype=_half)),
    "compressed-tensors": (eqq.Int(3, 32), eqq.Int8(32), eqq.FP8()),
    "bitsandbytes": (eqq.NF4(64),),
}
_prefixes = ("a", "a.0", "model.layers.0.up", "層", "x#2", "value", "a..b")
_parts = ("", "a", "0", "codes", "value", "value#2", "scale", "#2", "層", ".", "w")


def folders(case: Case) -> None:
    """A model in a folder that may have another one, and names of all kinds: what is
    written is what opens."""
    with tempfile.TemporaryDirectory() as name:
        _model(case, pathlib.Path(name))
        _names(case, pathlib.Path(name))


def _drawn(case):
    layout = case.pick(list(_writers))
    # All of GPTQ are of one format.
    formats = [case.pick(_writers[layout])] if layout == "gptq" else _writers[layout]
    arrays = {}
    for i in range(case.integer(1, 3)):
        w = jnp.asarray(case.rng.normal(size=(32, 64)), case.pick((_half, jnp.float32)))
        if case.chance(0.7):
            # With scales of its dtype, as files have them.
            format = case.pick(formats)
            w = eqq.quantize(w, format, axis=-1).astype(format.scale_dtype)
        arrays[f"{case.pick(_prefixes)}.{i}.weight"] = w
    return layout, arrays


def _model(case, folder):
    path = folder / "model"
    path.mkdir()
    before = _before(case, path)
    layout, arrays = _drawn(case)
    names = dict(kind="folder", layout=layout, before=before)
    write = lambda: interop.write(path, arrays, layout)
    old, expected = _opened(path), _dense(arrays)
    if case.chance(0.7):
        killed(write, path, case.integer(0, 12))
        try:
            found = _opened(path)
            case.expect("after a kill", found in (old, expected), **names)
        except ValueError as e:
            case.expect("refused after a kill", "Write it again" in str(e), **names)
    write()
    with interop.open(path) as checkpoint:
        case.expect("names", set(checkpoint) == set(arrays), **names)
        case.expect("numbers", _opened(path) == expected, **names)


def _before(case, path):
    kind = case.pick(("nothing", "files", "model", "section"))
    if kind == "files":
        arrays = {f"{i}.weight": np.ones((4, 4), np.float32) for i in range(3)}
        where = {key: f"model-{key[0]}-of-3.safetensors" for key in arrays}
        for key, file in where.items():
            files.save(path / file, {key: arrays[key]})
        index = {"metadata": {}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if kind == "model":
        layout, arrays = _drawn(case)
        interop.write(path, arrays, layout)
    if kind == "section":
        key = case.pick(("quantization", "quantization_config", "compression_config"))
        method = case.pick(("gptq", "awq", "fp8", "bitsandbytes", "mxfp4"))
        section = {"quant_method": method, "bits": 2, "group_size": 128}
        (path / "config.json").write_text(json.dumps({"a": 1, key: section}))
    return kind


def _dense(arrays):
    dense = {k: x.dequantize() if eqq.is_quantized(x) else x for k, x in arrays.items()}
    return {k: np.asarray(x, np.float32).tobytes() for k, x in dense.items()}


def _opened(path):
    if not list(path.glob("*.safetensors")):
        return {}
    with interop.open(path) as checkpoint:
        return _dense(checkpoint)


def _names(case, folder):
    # Names that are paths, and look like those of stored arrays.
    arrays = {}
    for i in range(case.integer(1, 8)):
        name = ".".join(case.pick(_parts) for _ in range(case.integer(1, 3)))
        x = jnp.full((16, 16), i, jnp.float32)
        arrays[name] = eqq.quantize(x, "int8") if case.chance(0.3) else x
    path = folder / "named.safetensors"
    names = dict(kind="names", names=sorted(arrays))
    interop.save(path, arrays)
    with interop.open(path) as checkpoint:
        case.expect("save", same(dict(checkpoint), arrays), **names)
    out = folder / case.pick(("out", "out.safetensors"))
    interop.convert(path, out, None)
    with interop.open(out) as checkpoint:
        case.expect("convert", same(dict(checkpoint), arrays), **names)
    shutil.rmtree(folder / "model")
