from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._product import full_spec
from ._tensors import ArrayType, as_dtype, from_tensor


def read_array(
    type: ArrayType, tensor: Any, sharding: NamedSharding | None, swapped: bool
) -> Array:
    """An array from the slice that safetensors gives of a tensor, placed as `sharding`
    says: each device's part is read by itself, and no other is. The last two axes are
    `swapped` on the way.

    **Raises:**

    A `ValueError` if JAX is not to use numbers of this dtype.
    """
    shape, dtype = type.data.shape, as_dtype(type.data.dtype)
    if swapped:
        shape = _swapped(shape)

    def read(index):
        part = from_tensor(type, _sliced(tensor, _swapped(index) if swapped else index))
        return part.swapaxes(-1, -2) if swapped else part

    if sharding is None:
        data = jax.device_put(read((slice(None),) * len(shape)))
    else:
        if type.implementation is not None:
            # The data of a key lie along an axis more.
            sharding = sharding.update(spec=full_spec(sharding.spec, len(shape)))
        data = jax.make_array_from_callback(shape, sharding, read, dtype)
    if type.implementation is None:
        return data
    return jax.random.wrap_key_data(data, impl=type.implementation)


def read_numpy(type: ArrayType, tensor: Any) -> np.ndarray:
    """The same as an array of NumPy, that can be written to."""
    index = (slice(None),) * len(type.data.shape)
    return np.array(from_tensor(type, _sliced(tensor, index)))


def _swapped(entries):
    *lead, i, j = entries
    return (*lead, j, i)


def _sliced(tensor, index):
    shape = tuple(tensor.get_shape())
    index += (slice(None),) * (len(shape) - len(index))
    # Without any numbers, it has no slices.
    return tensor[()][index] if 0 in shape else tensor[index]
