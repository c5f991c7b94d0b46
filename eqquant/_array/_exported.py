import copyreg
import json
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ..formats import format_from_json, format_to_json, Layout
from ._array import QuantizedArray
from ._json import spec_from_json, spec_to_json, tuple_from_json


# `jax.export` writes the static fields of quantized arguments and results as JSON. The
# stored arrays are children of the tree. Version 1 has no panels, and version 2 has
# other panels.
_name, _version = "eqquant.QuantizedArray", 3


def _to_json(aux: Any) -> bytes:
    # Equinox's `aux` is private, so the fields are read off an array that it makes.
    leaf = jtu.tree_structure(0)
    treedef = jtu.PyTreeDef.from_node_data_and_children(
        jtu.default_registry, (QuantizedArray, aux), [leaf]
    )
    q = jtu.tree_unflatten(treedef, [None])
    written = {
        "version": _version if q.layout.panels else 1,
        "format": format_to_json(q.format),
        "activation": None if q.activation is None else format_to_json(q.activation),
        "axis": q.axis,
        "tail": q.layout.tail,
        "inner": q.inner,
        "row_axis": q.layout.row_axis,
        "panels": q.layout.panels,
        "dtype": q.dtype.name,
        "sharding": _sharding_to_json(q.sharding),
        "writable": q.writable,
    }
    return json.dumps(written).encode()


def _from_json(text: bytes | bytearray) -> dict[str, Any]:
    static = json.loads(text)
    if static["version"] > _version:
        raise ValueError(
            f"The export has version {static['version']} of quantized arrays, and this "
            f"version of eqquant reads those up to {_version}. Use a later one."
        )
    if static["version"] == 2:
        raise ValueError(
            "The export has quantized arrays in the panels of an earlier version of "
            "eqquant, which had another layout: export it again."
        )
    activation = static["activation"]
    return {
        "layout": Layout(
            format_from_json(static["format"]),
            static["tail"],
            static["row_axis"],
            tuple_from_json(static.get("panels") or None),
        ),
        "activation": None if activation is None else format_from_json(activation),
        "axis": tuple_from_json(static["axis"]),
        "inner": tuple(static["inner"]),
        "dtype": _dtype_from_json(static["dtype"]),
        "sharding": _sharding_from_json(static["sharding"]),
        "writable": static.get("writable", False),
    }


def _dtype_from_json(name):
    dtype = jnp.dtype(name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"The export has quantized arrays of {name}, which JAX is not set up to "
            "use. Read it inside `with jax.enable_x64(True):`."
        )
    return dtype


def _sharding_to_json(sharding):
    if sharding is None:
        return None
    written: dict[str, Any] = {"spec": spec_to_json(sharding)}
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        written |= {
            "axes": mesh.axis_names,
            "sizes": mesh.axis_sizes,
            "types": [type.name for type in mesh.axis_types],
            "memory": sharding.memory_kind,
            "devices": [device.id for device in mesh.devices.flat]
            if isinstance(mesh, Mesh)
            else None,
        }
        if _sharding_from_json(written) != sharding:
            raise ValueError(
                f"The sharding {sharding} of a quantized array cannot be exported. "
                "Declare its `PartitionSpec` alone, by `with_sharding`."
            )
    return written


def _sharding_from_json(written):
    if written is None:
        return None
    spec = spec_from_json(written["spec"])
    if "axes" not in written:
        return spec
    sizes, axes = tuple(written["sizes"]), tuple(written["axes"])
    types = tuple(AxisType[name] for name in written["types"])
    if written["devices"] is None:
        mesh = AbstractMesh(sizes, axes, axis_types=types)
    else:
        known = {device.id: device for device in jax.devices()}
        if not known.keys() >= {*written["devices"]}:
            raise ValueError(
                f"A quantized array of the export is on the devices "
                f"{written['devices']}, but JAX has {[*known]}."
            )
        devices = np.array([known[i] for i in written["devices"]])
        mesh = Mesh(devices.reshape(sizes), axes, axis_types=types)
    return NamedSharding(mesh, spec, memory_kind=written["memory"])


def _from_children(aux_data, children):
    (stored,) = children
    return QuantizedArray(stored=stored, **aux_data)


jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name=_name,
    serialize_auxdata=_to_json,
    deserialize_auxdata=_from_json,
    from_children=_from_children,
)

# A compiled program goes to another process with the pickled tree structures of its
# arguments and results. In structures of modules, Equinox marks missing fields by a
# constant that it compares by identity. It is therefore pickled by its name, which
# finds the constant itself; a copy would look like a field.
_, (_nothing, *_) = jtu.tree_structure(eqx.nn.Identity()).node_data()
if type(_nothing).__module__.startswith("equinox."):
    copyreg.pickle(type(_nothing), lambda _: "MISSING")
