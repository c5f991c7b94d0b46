import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from .case import Case


def saved(case: Case) -> None:
    """Attention whose scores are masked, kept for the backward pass in 8 bits: its
    gradients are nearly those of `jax.checkpoint`."""
    heads, length, size = case.integer(1, 3), case.pick((32, 33, 70)), 16
    masked = case.pick((-np.inf, -1e30, -1e9, -1e5, float(np.finfo(np.float32).min)))
    of_scores, trained = case.chance(0.5), case.chance(0.5)
    draw = lambda *shape: jnp.asarray(case.rng.standard_normal(shape), jnp.float32)
    params = {"q": draw(heads, length, size), "slopes": jnp.abs(draw(heads))}
    far = np.abs(np.subtract.outer(*[np.arange(length)] * 2)).astype(np.float32)
    least = case.integer(1, length)

    def loss(params, n, wrap):
        slopes = params["slopes"]
        slopes = slopes if trained else jax.lax.stop_gradient(slopes)
        seen = (jnp.arange(length) < n)[None] | (far == 0)
        mask = jnp.where(seen, 0.0, masked)[None] - slopes[:, None, None] * far[None]
        q = params["q"]
        if of_scores:
            scores = q @ q.mT / 4 + mask
            out = wrap(lambda s, q: jax.nn.softmax(s) @ q, min_size=1)(scores, q)
        else:
            attend = lambda q, mask: jax.nn.softmax(q @ q.mT / 4 + mask) @ q
            out = wrap(attend, min_size=1)(q, mask)
        return jnp.mean(out**2)

    def gradients(wrap):
        found = jax.jit(lambda p, n: jax.grad(loss)(p, n, wrap))(params, least)
        return np.concatenate([np.ravel(a) for a in jax.tree.leaves(found)])

    found = gradients(eqq.train.save_quantized)
    wanted = gradients(lambda fn, min_size: jax.checkpoint(fn))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    about = f"{masked}, {of_scores=}, {trained=}, {length=}: off by {error:.3f}"
    case.expect(f"save_quantized of {about}", error < 0.05, kind="saved")
