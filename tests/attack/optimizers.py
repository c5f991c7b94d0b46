import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .case import Case


_makers = {
    "adamw4bit": eqq.train.adamw4bit,
    "adamw8bit": eqq.train.adamw8bit,
    "lion8bit": eqq.train.lion8bit,
    "muon8bit": eqq.train.muon8bit,
}
_specs = (P(), P("a"), P("b"), P("a", "b"), P(None, "a"), P(("a", "b")))


def optimizers(case: Case) -> None:
    """Steps of 8-bit optimizers: wherever a parameter is, the same."""
    name = case.pick([*_makers])
    optimizer = _makers[name](1e-3)
    shape = case.pick(((64, 64), (128, 48), (8, 64, 32), (8192,)))
    type = case.pick((AxisType.Auto, AxisType.Explicit))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(type, type))
    spec = P(*case.pick(_specs)[: len(shape)])
    draw = lambda: jnp.asarray(case.rng.standard_normal(shape), jnp.float32)
    w, *grads = draw(), draw(), draw()
    place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.numpy_dtype_promotion("standard"):
        expected = _steps(optimizer, w, grads)
        with jax.set_mesh(mesh):
            found = _steps(optimizer, place(w), [place(g) for g in grads])
    close = np.allclose(found, expected, rtol=1e-4, atol=1e-6)
    about = f"{name} of {shape} as {spec}, {type}"
    case.expect(about, close, kind="optimizer", transform="sharded")


def _steps(optimizer, w, grads):
    @jax.jit
    def step(w, state, g):
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state

    state = jax.jit(optimizer.init)(w)
    for g in grads:
        w, state = step(w, state, g)
    return w
