from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._array import as_mapped, is_quantized
from . import (
    _calls as _calls,
    _gather as _gather,
    _loops as _loops,
    _products as _products,
    _scaling as _scaling,
    _shards as _shards,
    _structure as _structure,
)
from ._interpreter import Interpreter
from ._trace import trace


def implicit(fn: Callable) -> Callable:
    """Makes any function of arrays one of quantized arrays, too.

    `fn` is traced as if it had been given the dequantized arrays. What it does is then
    done to the quantized ones: products read the packed codes; transposing, reshaping,
    and taking parts of leading axes leave them packed; and where there is no such rule,
    an array is dequantized, once and as late as possible. So the result is that of `fn`
    of the dequantized arrays, up to rounding.

    !!! Example

        ```python
        @eqquant.implicit
        def attention(x, w):
            q, k, v = jnp.einsum("td,sdhe->sthe", x, w)
            return jax.nn.dot_product_attention(q, k, v)

        attention(x, eqquant.quantize(w, "int8", axis=1))
        ```

    **Arguments:**

    - `fn`: a function that can be traced, whose arguments may be any PyTrees. It may be
        one itself, such as a layer: `eqquant.implicit(conv)(x)`. What is not an array
        is left to it as it is, as by `eqx.filter_jit`.

    **Returns:**

    A function of the same arguments. It can be compiled, differentiated, mapped and so
    on; and inside of `fn` everything can be.

    What it returns is an ordinary array where anything was computed. It is a
    [`eqquant.QuantizedArray`][] where `fn` returns one of its arguments itself, or the
    transpose, a cast, a multiple by a constant, a part, or another shape of it:
    `implicit(lambda w: 2 * w.T)(q)`. But single rows of a matrix are ordinary arrays,
    as those of `q[i]` are.

    **Raises:**

    Nothing but what `fn` does. With the environment variable `EQQUANT_ON_DEQUANTIZE`
    set to `raise`, a `RuntimeError` where an array would be dequantized; to `warn`, a
    warning where it is, each time that this is traced.

    !!! Info

        A quantized array that `fn` closes over is not one of its arguments: it can be
        used as always, `x @ q`, but not be given to JAX's own functions. Pass it as an
        argument, or as a part of `fn`: a module or a `jax.tree_util.Partial`.

        So is the function that `jax.vjp` returns: what it holds may be quantized, and
        it is to be called by `implicit`, too.

        A cast of a quantized array to a wider dtype casts what the codes stand for, not
        what was rounded to the narrower dtype first.
    """
    return eqx.module_update_wrapper(_Implicit(fn))


class _Implicit(eqx.Module):
    fn: Callable

    @property
    def __wrapped__(self):
        return self.fn

    def __get__(self, instance, owner):
        # For methods.
        return self if instance is None else eqx.Partial(self, instance)

    def __call__(self, *args, **kwargs):
        call = (self.fn, args, kwargs)
        leaves, treedef = jtu.tree_flatten(call, is_leaf=is_quantized)
        if not any(map(is_quantized, leaves)):
            return self.fn(*args, **kwargs)
        places = [i for i, x in enumerate(leaves) if eqx.is_array(x) or is_quantized(x)]
        values = [
            as_mapped(leaf) if is_quantized(leaf) else jnp.asarray(leaf)
            for leaf in (leaves[i] for i in places)
        ]
        out: Any = None

        def flat(*arrays):
            nonlocal out
            new = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                new[i] = array
            fn, args, kwargs = treedef.unflatten(new)
            results, static = eqx.partition(fn(*args, **kwargs), eqx.is_array)
            results, tree = jtu.tree_flatten(results)
            out = (tree, static)
            return results

        jaxpr = trace(flat, values)
        results = Interpreter().evaluate(jaxpr, values)
        tree, static = out
        return eqx.combine(tree.unflatten(results), static, is_leaf=is_quantized)
