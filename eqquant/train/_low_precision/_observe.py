import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ..._product import by_types, vary_together
from ._history import bin_of, counts


def observe(
    y: Float[Array, "..."],
    seen: Float[Array, "*b 3 bins"],
    bins: Int[Array, "*b 2"],
    *,
    stack: int,
    cotangents: bool,
) -> Float[Array, "..."]:
    """Returns `y`. In the transpose, the cotangent of `seen` counts in which of the
    `bins` the largest values of the operands fall; with `cotangents`, also the largest
    value of the cotangent."""
    y, seen, bins = vary_together(y, seen, bins)
    return observe_p.bind(y, seen, bins, stack=stack, cotangents=cotangents)


# A primitive, for the same reason as `linear_p`: the transpose is not linear in the
# cotangent, and has to see all of its rows.
observe_p = Primitive("observe")
observe_p.def_impl(lambda y, *others, **params: y)
observe_p.def_abstract_eval(lambda y, *others, **params: y)
mlir.register_lowering(observe_p, lambda ctx, y, *others, **params: [y])


def _jvp(primals, tangents, **params):
    y, seen, bins = primals
    dy, dseen, _ = tangents
    out = observe_p.bind(*primals, **params)
    if isinstance(dy, ad.Zero) and isinstance(dseen, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    dy, dseen = ad.instantiate_zeros(dy), ad.instantiate_zeros(dseen)
    return out, observe(dy, dseen, bins, **params)


ad.primitive_jvps[observe_p] = _jvp


def _transpose(ct, y, seen, bins, *, stack, cotangents):
    of_y, of_seen = map(ad.is_undefined_primal, (y, seen))
    if isinstance(ct, ad.Zero):
        return [ct if of_y else None, ad.Zero(seen.aval) if of_seen else None, None]
    if not of_seen:
        return [ct, None, None]

    def found(ct, bins):
        last = bin_of(ct, stack) if cotangents else jnp.zeros_like(bins[..., 0])
        every = jnp.concatenate([bins, last[..., None]], axis=-1)
        return counts(every).astype(seen.aval.dtype)

    found = by_types(found, seen.aval.sharding)
    return [ct if of_y else None, found(ct, bins), None]


ad.primitive_transposes[observe_p] = _transpose


def _batch(operands, axes, *, stack, **params):
    size = next(a.shape[i] for a, i in zip(operands, axes) if i is not None)
    moved = [batching.bdim_at_front(a, i, size) for a, i in zip(operands, axes)]
    return observe_p.bind(*moved, stack=stack + 1, **params), 0


batching.primitive_batchers[observe_p] = _batch
