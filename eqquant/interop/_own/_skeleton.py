from collections import OrderedDict
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ..._array import QuantizedArray, spec_from_json, tuple_from_json
from ...formats import format_from_json, Layout
from .._tensors import ArrayType, as_dtype
from ._header import damaged


class Skeleton(NamedTuple):
    """The contents of a file, without the numbers.

    - `tree`: has structs for arrays. The same struct, or quantized array, in two places
      is the same array in both.
    - `types`, `arrays`: the type and the struct of each array, by its name.
    - `quantized`: the quantized arrays, by their names.
    - `numpy`: `"array"` or `"scalar"`, for those of NumPy.
    """

    tree: PyTree
    types: dict[str, ArrayType]
    arrays: dict[str, jax.ShapeDtypeStruct]
    quantized: dict[str, QuantizedArray]
    numpy: dict[str, str]


def checked_skeleton(
    layout: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> Skeleton:
    """The skeleton that a header describes.

    **Arguments:**

    - `layout`: as `from_header` returns it.
    - `tensors`: safetensors' name of the dtype, and the shape, of each tensor.

    **Raises:**

    A `ValueError` if the header has an unknown dtype or format, or is inconsistent in
    itself or with the tensors.
    """
    try:
        skeleton = _to_skeleton(layout)
    except (AssertionError, AttributeError, LookupError, TypeError) as e:
        raise damaged("its metadata is damaged", repr(e)) from e
    expected = {name: type.tensor_type for name, type in skeleton.types.items()}
    for name in {**expected, **tensors}:
        if expected.get(name) != tensors.get(name):
            raise damaged(
                "its tensors differ from its metadata",
                f"{name!r} should be {expected.get(name)}, and is {tensors.get(name)}",
            )
    return skeleton


def _to_skeleton(layout: dict[str, Any]) -> Skeleton:
    types = {
        name: ArrayType(json["dtype"], tuple(json["shape"]))
        for name, json in layout["arrays"].items()
    }
    arrays = {name: type.struct for name, type in types.items()}
    quantized = {
        name: _quantized(name, json, arrays, layout["version"])
        for name, json in layout["quantized"].items()
    }
    numpy = {
        name: json["numpy"]
        for name, json in layout["arrays"].items()
        if "numpy" in json
    }
    assert {"array", "scalar"}.issuperset(numpy.values()), numpy
    tree = _node(layout["tree"], arrays, quantized)
    return Skeleton(tree, types, arrays, quantized, numpy)


def _node(json, arrays, quantized) -> Any:
    if not isinstance(json, dict):
        return json
    ((kind, value),) = json.items()
    if kind == "dict":
        # JAX sorts the keys of a plain dictionary, but these may not be comparable.
        return OrderedDict(
            (_key(k), _node(child, arrays, quantized)) for k, child in value
        )
    if kind == "list":
        return [_node(child, arrays, quantized) for child in value]
    if kind == "array":
        return arrays[value]
    if kind == "quantized":
        return quantized[value]
    assert kind == "complex"
    return complex(*value)


def _key(json):
    return tuple(map(_key, json)) if isinstance(json, list) else json


def _quantized(name, json, arrays, version):
    activation = json["activation"]
    q = QuantizedArray(
        stored=_node(json["stored"], arrays, {}),
        layout=Layout(
            format_from_json(json["format"]),
            json["tail"],
            -2 if version == 1 else json["row_axis"],
        ),
        axis=tuple_from_json(json["axis"]),
        sharding=spec_from_json(json["sharding"]),
        activation=None if activation is None else format_from_json(activation),
        dtype=as_dtype(json["dtype"]),
        inner=tuple(json["inner"]),
        writable=json.get("writable", False),
    )
    if q.shape != tuple(json["shape"]):
        raise ValueError(
            f"{name!r} should have shape {tuple(json['shape'])}, but its stored "
            f"arrays, in {q.format}, have shape {q.shape}."
        )
    return q
