"""Finds parts of quantized arrays that no layout reads, or that lack another part.
Reading them as ordinary arrays would give wrong numbers."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._checkpoint import Entry
from .._containers import RawTensor


_floats = ("F16", "BF16", "F32", "F64")
_words = ("I16", "U16", "I32", "U32", "I64", "U64")
# The names of parts that only quantized arrays have.
_parts = re.compile(
    r"qweight|qzeros|trellis|suh|svh|W_q|g_idx|SCB|scale_weight|_weight_(qdata|scale|zero_point)"
    r"|weight_(packed|shape|format|scales?|scale_inv|scale_2|zero_point|global_scale"
    r"|g_idx)"
)
# The names of parts that quantized arrays have if the configuration names a method.
_of_method = ("scales", "biases")
# The names of parts below the name of a weight, in bitsandbytes and in sparse arrays.
_below = re.compile(
    r".*weight\.((nested_)?(absmax|quant_map)|quant_state\..*"
    r"|compressed|bitmask|row_offsets|packed|meta)"
)
_of_mxfp4 = re.compile(r".*_(blocks|scales)")
# The names of scales, except scales of activations, which do not affect weights.
_scale = re.compile(
    r"(?!(input|output|act|prob|kv|[qkv])_)"
    r".*(scale|zero|absmax|scb|quant_map|codebook|g_idx|biases).*",
    re.IGNORECASE,
)
_weight = re.compile(r"(\w*_)?(weight|kernel|data|codes|packed)|W_q")
_libraries = {"W_q": "HQQ", "scale_weight": "ComfyUI", "weight_scales": "EETQ"}


def unread(
    tensors: Mapping[str, RawTensor],
    quantized: Iterable[Entry],
    config: Mapping[str, Any],
) -> dict[str, Callable[[], str]]:
    """Returns, by name, why tensors of a file that belong to no layout, and to no array
    `quantized` that one finds, are not ordinary arrays. `config` is the content of
    `config.json`. (A file may have some 100,000 of them, so each is a function that
    writes the sentence on request.)"""
    used = {source.name for entry in quantized for source in entry.sources}
    left = {name: t for name, t in tensors.items() if name not in used}
    method = _method(config)
    scales = {name for name in left if _scale.fullmatch(_split(name)[1])}
    stems = {stem for name in scales for stem in _stems(name)}
    beside = {_split(name)[0] for name in scales}

    def is_codes(name, tensor):
        module, last = _split(name)
        if not _is_code(tensor) or tensor.ndim == 0 or name in scales:
            return False
        is_weight = _weight.fullmatch(last) is not None
        if is_weight and method is not None and tensor.ndim > 1:
            return True
        if tensor.kind in _words and last != "weight":
            return False
        return name in stems or is_weight and module in beside

    suspects = {
        name
        for name, t in left.items()
        if is_codes(name, t)
        or _is_part(name, t, tensors)
        or _is_of_method(name, method)
    }
    modules = {_split(name)[0] for name in suspects if _is_of_module(name)}
    # Parts of a weight may be below its name, so its module counts, too.
    above = map(_split, modules)
    modules |= {module for module, last in above if module and _weight.fullmatch(last)}
    owners = {_split(name)[0] for name in used} - {""}

    def is_beside(name):
        module = _split(name)[0]
        if module in modules:
            # Without a method, a module may have ordinary arrays, too.
            known = name in scales or _is_code(left[name])
            return known or method is not None and not name.endswith("bias")
        if name not in scales:
            return False
        return module in owners or any(stem in suspects for stem in _stems(name))

    by_module = _by_module(n for n in left if n in suspects or is_beside(n))
    return {
        name: functools.partial(_why, name, left[name], names, method)
        for names in by_module.values()
        for name in names
    }


def _is_of_method(name, method):
    last = _split(name)[1]
    return (method is not None and last == "scales") or (
        method == "mlx" and last == "biases"
    )


def may_be_part(name: str) -> bool:
    """Whether the name of a tensor may denote a part of a quantized array."""
    last = _split(name)[1]
    return last in _of_method or _scale.fullmatch(last) is not None


def _method(config):
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    if isinstance(method, str):
        return method
    return "mlx" if isinstance(config.get("quantization"), dict) else None


def _split(name):
    module, _, last = name.rpartition(".")
    return module, last


def _by_module(names):
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_split(name)[0], []).append(name)
    return found


def _is_code(tensor):
    return tensor.kind in ("I8", "U8", *_words) or tensor.kind.startswith("F8")


def _is_part(name, tensor, tensors):
    module, last = _split(name)
    if _below.fullmatch(name):
        return True
    if _of_mxfp4.fullmatch(last) and tensor.kind == "U8":
        return True
    if not _parts.fullmatch(last):
        return False
    # Next to a weight of floats, it is an ordinary array.
    weight = tensors.get(f"{module}.weight" if module else "weight")
    return weight is None or weight.kind not in _floats


def _is_of_module(name):
    # In files of flat names, all arrays would be in the same module.
    module, last = _split(name)
    return module != "" or _weight.fullmatch(last) is not None


def _stems(name):
    """Returns the prefixes of a name that end before a dot or an underscore."""
    return [name[:i] for i, x in enumerate(name) if x in "._" and i > 0]


def _why(name, tensor, suspects, method):
    library = next(
        (_libraries[x] for _, x in map(_split, suspects) if x in _libraries), None
    )
    of = "" if library is None else f", as {library} has them"
    if method is not None:
        of = f", by the method {method!r} that 'config.json' names"
    others = [repr(n) for n in suspects if n != name][:3]
    beside = f" beside {', '.join(others)}" if others else ""
    return (
        f"it is a part of a quantized array{of}, that this library does not read, or "
        f"that lacks another part: it is of {tensor.kind} {tensor.shape}{beside}. "
        f"If it is an ordinary array, pass `ordinary=[{name!r}, ...]` when the file is "
        f"opened or converted (--ordinary {name!r}); in it, '*' matches any text."
    )
