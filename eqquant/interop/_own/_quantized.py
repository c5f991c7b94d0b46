import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..._array import check_activation, QuantizedArray, spec_from_json, tuple_from_json
from ..._product import as_tuple, normalise_axis
from ...formats import format_from_json, Layout, Stored
from .._containers import check_shape, short
from .._tensors import as_dtype
from ._node import field, fitting, to_tree, wrong


def to_quantized(
    name: str, json: Any, arrays: Mapping[str, Any], version: int, kinds: dict[Any, Any]
) -> QuantizedArray:
    """Returns a quantized array, with structs instead of numbers, from its description
    in a header. Raises a `ValueError` if its fields and stored arrays are not the ones
    that [`eqquant.quantize`][] would produce for an array of this shape.

    - `name`, `json`: its name and its description.
    - `arrays`: the structs of all arrays.
    - `version`: the version of the header.
    - `kinds`: a cache of results for the formats in the file, which is added to.
    """
    shape = field(json, "shape", list)
    check_shape(name, shape)
    dtype = as_dtype(field(json, "dtype", str))
    fitting(jnp.issubdtype(dtype, jnp.floating), "dtype", dtype)
    format = format_from_json(field(json, "format", dict))
    activation = json.get("activation")
    if activation is not None:
        activation = format_from_json(activation)
        _once(kinds, activation, check_activation, activation)
    axis = tuple_from_json(field(json, "axis", int, list))
    fitting(normalise_axis(axis, tuple(shape)) == axis, "axis", axis)
    contracted = [shape[i] for i in as_tuple(axis)]
    fitting(field(json, "inner", list) == contracted[1:], "inner", json["inner"])
    rows = [n for i, n in enumerate(shape, -len(shape)) if i not in as_tuple(axis)]
    rows.append(math.prod(contracted))
    row_axis = -2 if version == 1 else field(json, "row_axis", int)
    fitting(row_axis in ((-2,) if len(rows) == 1 else (-2, -1)), "row_axis", row_axis)
    writable = json.get("writable", False)
    fitting(type(writable) is bool, "writable", writable)
    layout = Layout(format, 0, row_axis)
    expected = _stored(layout, rows, kinds)
    stored = to_tree(field(json, "stored", dict), arrays, {})
    q = QuantizedArray(
        stored=_matched(name, stored, expected),
        layout=layout.trimmed(expected, rows[-1]),
        axis=axis,
        sharding=_spec(json.get("sharding"), len(shape)),
        activation=activation,
        dtype=dtype,
        inner=tuple(contracted[1:]),
        writable=writable,
    )
    fitting(field(json, "tail", int) == q.layout.tail, "tail", json["tail"])
    fitting(q.shape == tuple(shape), "shape", shape)
    return q


def _stored(layout: Layout, rows: list[int], kinds: dict[Any, Any]) -> Stored:
    # Formats keep leading axes and rows, unless all rows share an array. So the structs
    # of a small matrix determine the structs of any number of rows.
    *lead, k = rows
    format = layout.format
    if not lead:
        return _once(kinds, (format, k), format.structs, (k,))

    def of_rows(x):
        n, m = x.shape
        own = (*lead[:-1], lead[-1] if n == 2 else 1, m)
        return jax.ShapeDtypeStruct(layout.by_row(own), x.dtype)

    of_two = _once(kinds, (format, 2, k), format.structs, (2, k))
    return jtu.tree_map(of_rows, of_two)


def _once(known, key, fn, *args):
    # A model has few formats and sizes, and tracing an encoder is slow.
    if key not in known:
        known[key] = fn(*args)
    return known[key]


def _matched(name: str, found: Any, expected: Any, key: str = "") -> Any:
    if not isinstance(expected, dict):
        is_array = isinstance(found, jax.ShapeDtypeStruct)
        dtypes = [expected.dtype]
        if key == "zero_point":
            # Zero-points of other libraries may be one beyond the largest code.
            dtypes += [jnp.dtype(jnp.int16), jnp.dtype(jnp.uint16)]
        if not is_array or found.shape != expected.shape or found.dtype not in dtypes:
            raise wrong(
                f"{name!r} should store {key} of {_text(expected)}, and has "
                f"{_text(found) if is_array else short(found)}"
            )
        return found
    if not isinstance(found, dict) or found.keys() != expected.keys():
        raise wrong(f"{name!r} should store {', '.join(expected)}. Got {short(found)}")
    return {
        key: _matched(name, found[key], child, key) for key, child in expected.items()
    }


def _text(x):
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _spec(json, ndim):
    if json is None:
        return None
    fitting(isinstance(json, list) and len(json) <= ndim, "sharding", json)
    flat = [x for e in json for x in (e if isinstance(e, list) else [e])]
    named = [x for x in flat if x is not None]
    fitting(all(isinstance(x, str) for x in named), "sharding", json)
    fitting(len(set(named)) == len(named), "sharding", json)
    return spec_from_json(json)
