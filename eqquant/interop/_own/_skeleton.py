from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ..._array import QuantizedArray
from .._containers import check_shape, RawTensor
from .._tensors import ArrayType
from ._header import damaged, from_header
from ._node import field, fitting, to_on_call, to_tree
from ._quantized import to_quantized


class Skeleton(NamedTuple):
    """The contents of a file, without the numbers.

    - `tree`: the tree with structs instead of arrays. A struct, or a quantized array,
      in two places is the same array in both.
    - `types`, `arrays`: the type and the struct of each array, by its name.
    - `quantized`: the quantized arrays, by their names.
    - `numpy`: `"array"` or `"scalar"` for each NumPy array and scalar, by its name.
    - `on_call`: the paths, of plain keys, of modules that run under `implicit`, and
      whether all their methods do.
    """

    tree: PyTree
    types: dict[str, ArrayType]
    arrays: dict[str, jax.ShapeDtypeStruct]
    quantized: dict[str, QuantizedArray]
    numpy: dict[str, str]
    on_call: dict[tuple[Any, ...], bool]


def checked_skeleton(
    metadata: dict[str, str], tensors: Mapping[str, RawTensor]
) -> Skeleton:
    """Returns the skeleton that the metadata of a file describe. Raises a `ValueError`
    if they have an unknown dtype or format, or are inconsistent in themselves or with
    the tensors."""
    layout = from_header(metadata)
    try:
        skeleton = _to_skeleton(layout)
    except _damages as e:
        # These come from values that nothing checks before, such as fields of a format.
        raise damaged("its metadata is damaged", repr(e)) from e
    expected = {name: type.tensor_type for name, type in skeleton.types.items()}
    got = {name: (x.kind, x.shape) for name, x in tensors.items()}
    for name in {**expected, **got}:
        if expected.get(name) != got.get(name):
            raise damaged(
                "its tensors differ from its metadata",
                f"{name!r} should be {expected.get(name)}, and is {got.get(name)}",
            )
    return skeleton


_damages = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


def _to_skeleton(layout: dict[str, Any]) -> Skeleton:
    described = field(layout, "arrays", dict)
    types = {name: _type(name, json) for name, json in described.items()}
    arrays = {name: type.struct for name, type in types.items()}
    numpy = {
        name: _numpy(json, types[name])
        for name, json in described.items()
        if "numpy" in json
    }
    version, kinds = layout["version"], {}
    quantized = {
        name: to_quantized(name, json, arrays, version, kinds)
        for name, json in field(layout, "quantized", dict).items()
    }
    tree = to_tree(layout["tree"], arrays, quantized)
    on_call = to_on_call(layout.get("on_call", []))
    return Skeleton(tree, types, arrays, quantized, numpy, on_call)


def _type(name, json):
    dtype, shape = field(json, "dtype", str), field(json, "shape", list)
    check_shape(name, shape)
    return ArrayType(dtype, tuple(shape))


def _numpy(json, type):
    kind = json["numpy"]
    is_scalar = kind == "scalar" and type.shape == ()
    fits = kind == "array" or is_scalar
    fitting(fits and type.implementation is None, "numpy", kind)
    return kind
