from collections import OrderedDict
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._array import QuantizedArray
from ..formats import Layout
from ._formats import format_from_json
from ._tensors import ArrayType, as_dtype


class Skeleton(NamedTuple):
    """What a file holds, without the numbers: a tree whose arrays are structs. The same
    struct, or quantized array, in two places is the same array in both. What was of
    NumPy, `numpy` tells of: `"array"` or `"scalar"`."""

    tree: PyTree
    types: dict[str, ArrayType]
    arrays: dict[str, jax.ShapeDtypeStruct]
    quantized: dict[str, QuantizedArray]
    numpy: dict[str, str]


def to_skeleton(layout: dict[str, Any]) -> Skeleton:
    """From what `save` wrote to the metadata.

    **Raises:**

    A `ValueError` if it tells of a dtype or a format that is not known, or contradicts
    itself.
    """
    types = {
        name: ArrayType(json["dtype"], tuple(json["shape"]))
        for name, json in layout["arrays"].items()
    }
    arrays = {name: type.struct for name, type in types.items()}
    quantized = {
        name: _quantized(name, json, arrays)
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
        # JAX would sort the keys of a plain one, which may be of different types.
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


def _quantized(name, json, arrays):
    activation, sharding = json["activation"], json["sharding"]
    q = QuantizedArray(
        stored=_node(json["stored"], arrays, {}),
        layout=Layout(format_from_json(json["format"]), json["tail"]),
        axis=tuple_from_json(json["axis"]),
        sharding=None
        if sharding is None
        else PartitionSpec(*map(tuple_from_json, sharding)),
        activation=None if activation is None else format_from_json(activation),
        dtype=as_dtype(json["dtype"]),
        inner=tuple(json["inner"]),
    )
    if q.shape != tuple(json["shape"]):
        raise ValueError(
            f"{name!r} should have shape {tuple(json['shape'])}, but what is stored in "
            f"{q.format} has shape {q.shape}."
        )
    return q


def tuple_from_json(json: Any) -> Any:
    """What JSON has made a list, as the tuple that it was."""
    return tuple(json) if isinstance(json, list) else json
