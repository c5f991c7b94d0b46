import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from . import laws_of_layout, laws_of_numbers, laws_of_use, weights
from .case import Case
from .formats import draw_activation, draw_format, name_of


_laws = (*laws_of_layout.laws, *laws_of_numbers.laws, *laws_of_use.laws)
_shapes = ((48,), (33, 20), (64, 48), (5, 129), (3, 32, 17), (2, 3, 65, 8), (1, 1))
_shapes += ((0, 16), (16, 0), (2, 0, 5), (256, 33), (4, 3, 3, 8))
_dtypes = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)


def round_trips(case: Case) -> None:
    """What holds of an array and of what it stands for, bit for bit."""
    format, shape = draw_format(case), case.pick(_shapes)
    kind, dtype = case.pick(weights.kinds[:-2]), case.pick(_dtypes)
    axis = case.integer(-min(2, len(shape)), -1)
    if len(shape) > 2 and case.chance(0.3):
        axis = case.integer(-len(shape), -1)
    w = weights.draw_weight(case, shape, kind, format, dtype)
    activation = draw_activation(case)
    q = eqq.quantize(w, format, axis=axis, activation=activation)
    names = dict(kind="round trip", format=name_of(format), weights=kind)
    d = q.dequantize()
    about = f"{q}"
    case.expect(f"{about}: shape", d.shape == q.shape == w.shape, **names)
    case.expect(f"{about}: dtype", d.dtype == q.dtype == w.dtype, **names)
    case.expect(f"{about}: finite", np.isfinite(np.asarray(d, float)).all(), **names)
    for law in (case.pick(_laws), case.pick(_laws), case.pick(_laws)):
        for what, holds in law(case, q, d, w):
            case.expect(f"{about}: {law.__name__}, {what}", holds, **names)
