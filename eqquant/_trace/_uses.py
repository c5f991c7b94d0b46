import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from ._site import Product
from ._walk import walk


@dataclasses.dataclass(frozen=True)
class Use:
    """How a program uses a leaf.

    - `products`: the products that it enters, in order.
    - `others`: the names of the other primitives that it enters.
    - `changed`: the products that it enters after elementwise functions have changed
        its numbers, such as the softplus of a weight, or a weight times a mask. The
        other operands of these functions depend on no other argument than the leaf's.
    """

    products: tuple[Product, ...]
    others: tuple[str, ...]
    changed: tuple[Product, ...] = ()


def uses(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Use, ...]:
    """Returns how a function uses each array among its arguments: a `Use` for each, in
    the order of `jax.tree_util.tree_leaves`. The function is traced, and not run.
    Arrays among `args` may be `jax.ShapeDtypeStruct`s; leaves that are not arrays are
    passed unchanged."""
    dynamic, static = eqx.partition(tuple(args), is_array)

    def call(dynamic):
        out = fn(*eqx.combine(dynamic, static))
        return eqx.filter(out, eqx.is_array)

    jaxpr = jax.make_jaxpr(call)(dynamic)
    shapes = [leaf.shape for leaf in jtu.tree_leaves(dynamic)]
    argument = [i for i, arg in enumerate(dynamic) for _ in jtu.tree_leaves(arg)]
    walked = walk(jaxpr, shapes, argument)
    products = lambda sites: tuple(site.product for site in sites)
    found = zip(walked.sites, walked.others, walked.changed, strict=True)
    return tuple(
        Use(products(sites), tuple(dict.fromkeys(names)), products(changed))
        for sites, names, changed in found
    )


def is_array(x: Any) -> bool:
    """Whether this is an array, or describes one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
