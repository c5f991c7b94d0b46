from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ..._array import QuantizedArray
from .._containers import check_shape
from .._tensors import ArrayType
from ._header import damaged
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
    layout: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> Skeleton:
    """Returns the skeleton that a header describes. Raises a `ValueError` if the header
    has an unknown dtype or format, or is inconsistent in itself or with the tensors.
    `tensors` has the safetensors name of the dtype, and the shape, of each tensor."""
    try:
        skeleton = _to_skeleton(layout)
    except _damages as e:
        # These come from values that nothing checks before, such as fields of a format.
        raise damaged("its metadata is damaged", repr(e)) from e
    expected = {name: type.tensor_type for name, type in skeleton.types.items()}
    for name in {**expected, **tensors}:
        if expected.get(name) != tensors.get(name):
            raise damaged(
                "its tensors differ from its metadata",
                f"{name!r} should be {expected.get(name)}, and is {tensors.get(name)}",
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
