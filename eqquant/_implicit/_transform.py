from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._array import as_mapped, held, is_quantized
from . import (
    _calls as _calls,
    _gather as _gather,
    _loops as _loops,
    _products as _products,
    _scaling as _scaling,
    _shards as _shards,
    _structure as _structure,
    _writes as _writes,
)
from ._interpreter import Interpreter
from ._table import is_operand
from ._trace import trace


def implicit(fn: Callable) -> Callable:
    """Transforms a function of arrays into one that also takes quantized arrays.

    `fn` is traced with dense arrays, and the resulting jaxpr is evaluated on the
    quantized ones: products read the packed codes; transposing, reshaping and indexing
    of leading axes keep arrays packed. If an operation has no such rule, its operand is
    dequantized, once and as late as possible. The result equals that of `fn` on
    dequantized arrays, up to rounding.

    Writing into an array makes it dense, too, unless it is `writable`: then
    `lax.dynamic_update_slice`, `.at[].set` and `jnp.concatenate` round the written
    numbers to its format. So a cache of keys and values stays packed, also in the carry
    of a loop and within `jax.checkpoint`, without changes to the model. NaN or infinity
    in the written numbers makes their whole block NaN. Operations that compute with the
    previous numbers give a dense array: `.at[].add` and `.at[].apply`, `jnp.pad`, and a
    `lax.cond` with a branch that computes.

    !!! Example

        ```python
        @eqquant.implicit
        def attention(x, w):
            q, k, v = jnp.einsum("td,sdhe->sthe", x, w)
            return jax.nn.dot_product_attention(q, k, v)

        attention(x, eqquant.quantize(w, "int8", axis=1))
        ```

        ```python
        pack = lambda a: eqquant.quantize(a, "int8", axis=-1, writable=True)
        cache = jax.tree.map(pack, (keys, values))
        logits, cache = eqquant.implicit(model)(tokens, cache)
        ```

    **Arguments:**

    - `fn`: a function that JAX can trace, of any PyTrees. It may be a PyTree itself,
        such as a layer: `eqquant.implicit(conv)(x)`. Leaves that are not arrays are
        passed unchanged, as in `eqx.filter_jit`.

    **Returns:**

    A function of the same arguments. All of JAX's transformations may be applied to it,
    and within `fn`.

    Weights of [`eqquant.train.tree_compute`][] are also taken: products and
    convolutions with them round their operands. So are weights of
    [`eqquant.train.tree_fake_quantize`][], which all operations see rounded, and
    weights with adapters of [`eqquant.train.lora`][]: products multiply by the thin
    matrices. Functions with custom derivatives (`jax.custom_vjp`) see ordinary arrays
    instead.

    Results are dense arrays, with one exception: if `fn` returns one of its arguments,
    or its transpose, a cast, a constant multiple, a part, or a reshape of it, as in
    `implicit(lambda w: 2 * w.T)(q)`, or an argument that it has written into, the
    result is a [`eqquant.QuantizedArray`][]. (Rows of a matrix are dense, like `q[i]`.)

    **Raises:**

    A `TypeError` if `fn` is not a function, and the errors of `fn`. If the environment
    variable `EQQUANT_ON_DEQUANTIZE` is `raise`, also a `RuntimeError` wherever an array
    would be dequantized. If it is `warn`, tracing warns of each dequantization.

    !!! Info

        A quantized array that `fn` closes over is not an argument: `x @ q` works, but
        JAX's own functions do not take it. Pass it as an argument or as a part of `fn`:
        a module, or a `jax.tree_util.Partial`.

        Likewise, the function that `jax.vjp` returns may hold quantized arrays: call it
        through `implicit`, too.

        A cast of a quantized array to a wider dtype casts the exact decoded numbers,
        which are not rounded to the narrower dtype first.
    """
    if not callable(fn):
        raise TypeError(f"`fn` should be a function. Got {type(fn).__name__}.")
    return eqx.module_update_wrapper(_Implicit(held(fn)))


class _Implicit(eqx.Module):
    fn: Callable

    @property
    def __wrapped__(self):
        return self.fn

    def __get__(self, instance, owner):
        # Binds methods to their instance.
        return self if instance is None else eqx.Partial(self, instance)

    def __call__(self, *args, **kwargs):
        call = (self.fn, args, kwargs)
        leaves, treedef = jtu.tree_flatten(call, is_leaf=is_operand)
        if not any(map(is_operand, leaves)):
            return self.fn(*args, **kwargs)
        places = [i for i, x in enumerate(leaves) if eqx.is_array(x) or is_operand(x)]
        values = [_as_value(leaf) for leaf in (leaves[i] for i in places)]
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
        return eqx.combine(tree.unflatten(results), static, is_leaf=is_operand)


def _as_value(leaf):
    if is_quantized(leaf):
        return as_mapped(leaf)
    return leaf if is_operand(leaf) else jnp.asarray(leaf)
