import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._containers import dtypes


# The dtypes that every safetensors reader supports, and their names in files.
_plain = {
    dtypes[kind].name: kind
    for kind in (
        *("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"),
        *("F16", "BF16", "F32", "F64"),
    )
}

# The dtypes that weights of language models have, by their names in configurations.
weight_dtypes = {dtypes[kind].name: dtypes[kind] for kind in ("F32", "F16", "BF16")}

# Stored with one more axis, for the real and the imaginary part.
_complex = {"complex64": "float32", "complex128": "float64"}

# Stored as bytes, one for each number.
_bytes = {
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
}

_dtypes = {*_plain, *_complex, *_bytes}


class ArrayType(NamedTuple):
    """The dtype and the shape of an array in a file. `dtype` is a name. For random
    keys, it includes their implementation, as in `"key:threefry2x32"`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def implementation(self) -> str | None:
        kind, _, name = self.dtype.partition(":")
        return name if kind == "key" else None

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The array as a `jax.ShapeDtypeStruct`."""
        if self.implementation is None:
            return jax.ShapeDtypeStruct(self.shape, known_dtype(self.dtype))
        key, _ = _key_structs(self.implementation)
        return jax.ShapeDtypeStruct(self.shape, key.dtype)

    @property
    def data(self) -> "ArrayType":
        """For random keys, the type of their data; otherwise itself."""
        if self.implementation is None:
            return self
        _, data = _key_structs(self.implementation)
        return ArrayType(data.dtype.name, (*self.shape, *data.shape))

    @property
    def container(self) -> tuple[str, tuple[int, ...]]:
        """The dtype and the shape of the tensor that holds the array."""
        dtype, shape = self.data
        if dtype in _complex:
            return _complex[dtype], (*shape, 2)
        return "uint8" if dtype in _bytes else dtype, shape

    @property
    def tensor_type(self) -> tuple[str, tuple[int, ...]]:
        """The type of the tensor, with the safetensors name of the dtype."""
        dtype, shape = self.container
        return _plain[dtype], shape


def known_dtype(name: str) -> np.dtype:
    """Returns the dtype of this name. Raises a `ValueError` if there is none."""
    if name not in _dtypes:
        raise ValueError(f"it has arrays of an unknown dtype, {name!r}.")
    return jnp.dtype(name)


def as_dtype(name: str) -> np.dtype:
    """Returns the dtype of this name, for a JAX array. Raises a `ValueError` if there
    is none, or if JAX would narrow it to 32 bits."""
    dtype = known_dtype(name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"it has numbers of {name}, which JAX is not set up to use. Set "
            "`JAX_ENABLE_X64=1`, or read it inside `with jax.enable_x64(True):`."
        )
    return dtype


def for_jax(x: np.ndarray) -> np.ndarray:
    """Returns an array in the dtype that JAX uses for it. If 64-bit types are disabled,
    64-bit integers that fit into 32 bits are narrowed. Raises a `ValueError` if its
    dtype is unknown, or if narrowing would lose bits."""
    narrow = jax.dtypes.canonicalize_dtype(known_dtype(x.dtype.name))
    if jnp.issubdtype(narrow, jnp.integer) and narrow != x.dtype:
        found = x.astype(narrow)
        if np.array_equal(found, x):
            return found
    as_dtype(x.dtype.name)
    return x


def is_key(x: Any) -> bool:
    """Whether an array, or a struct of one, holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def type_of(x: Any) -> ArrayType:
    """Returns the type of an array. Raises a `ValueError` if JAX has no such dtype."""
    if is_key(x):
        implementation = jax.random.key_impl(x)
        if not isinstance(implementation, str):
            raise ValueError(
                "random keys can be saved if their implementation has a name. Got "
                f"{implementation}."
            )
        return ArrayType(f"key:{implementation}", x.shape)
    if x.dtype.name not in _dtypes or not x.dtype.isnative:
        raise ValueError(f"it should have a dtype that JAX supports. Got {x.dtype}.")
    return ArrayType(x.dtype.name, x.shape)


def to_tensor(x: np.ndarray) -> np.ndarray:
    """Converts an array for a file, to a dtype of safetensors."""
    dtype, shape = type_of(x).container
    return np.asarray(x, order="C").reshape(-1).view(dtype).reshape(shape)


def from_tensor(type: ArrayType, tensor: np.ndarray) -> np.ndarray:
    """The inverse of `to_tensor`. For random keys, returns their data."""
    dtype = type.data.dtype
    shape = tensor.shape[:-1] if dtype in _complex else tensor.shape
    flat = np.asarray(tensor, order="C").reshape(-1)
    return flat.view(known_dtype(dtype)).reshape(shape)


@ft.cache
def _key_structs(implementation):
    # Returns the structs of one key, and of its data.
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    return key, jax.eval_shape(jax.random.key_data, key)
