import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from ..helpers import normal


def quantized(format, *shape, dtype=jnp.float32):
    return eqq.quantize(normal(*shape), format, axis=-1).astype(dtype)


def dense(x):
    x = x.astype(jnp.float32)
    return np.asarray(x.dequantize() if eqq.is_quantized(x) else x)
