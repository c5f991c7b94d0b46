import fnmatch
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

import eqquant as eqq

from .models import Example


class Measured(NamedTuple):
    """What became of a model, quantized in one call. Differences are from the model of
    the same weights dequantized: the largest, relative to the largest number of the
    array.

    - `share`: of the numbers in matrices, those that are quantized.
    - `left`: the paths of matrices that are not.
    - `eager`, `jitted`: of the outputs.
    - `inputs`, `others`: of gradients, with respect to the inputs, and to the leaves
        that stay in floating point. `None` if there are none.
    """

    share: float
    left: tuple[str, ...]
    eager: float
    jitted: float
    inputs: float | None
    others: float | None


def measured(example: Example, format: eqq.AbstractFormat) -> Measured:
    model, call, args, spared = example
    quantized = eqq.tree_quantize(model, format, min_size=0, example=(call, args))
    dense = eqq.tree_dequantize(quantized)
    left, sizes = [], {True: 0, False: 0}
    found, _ = jtu.tree_flatten_with_path(quantized, is_leaf=eqq.is_quantized)
    for path, leaf in found:
        name = jtu.keystr(path, simple=True, separator=".")
        taken = eqq.is_quantized(leaf)
        if taken or _is_matrix(leaf, name, spared):
            sizes[taken] += leaf.size
            left += [] if taken else [name]
    plain = lambda model: _arrays(call(model, *args))
    jitted = eqx.filter_jit(plain)
    wanted = jitted(dense)
    trained = [i for i, (_, leaf) in enumerate(found) if eqx.is_inexact_array(leaf)]
    gradients = eqx.filter_jit(lambda model: _gradients(model, call, args, trained))
    differ = lambda i, new, old: _difference(new[i], old[i]) if old[i] else None
    new, old = gradients(quantized), gradients(dense)
    return Measured(
        sizes[True] / sum(sizes.values()),
        tuple(left),
        _difference(plain(quantized), wanted),
        _difference(jitted(quantized), wanted),
        differ(0, new, old),
        differ(1, new, old),
    )


def _is_matrix(leaf, name, spared):
    if not eqx.is_inexact_array(leaf) or sum(n > 1 for n in leaf.shape) < 2:
        return False
    return not any(fnmatch.fnmatch(name, glob) for glob in spared)


def _arrays(tree):
    return [x for x in jtu.tree_leaves(tree) if eqx.is_inexact_array(x)]


def _gradients(model, call, args, places):
    """With respect to the inputs, and to the leaves in these places."""
    inputs, ids = eqx.partition(args, eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(model, is_leaf=eqq.is_quantized)
    trained = {i: leaves[i] for i in places}

    def loss(inputs, trained):
        args = eqx.combine(inputs, ids)
        model = treedef.unflatten(trained.get(i, a) for i, a in enumerate(leaves))
        out = _arrays(call(model, *args))
        keys = jr.split(jr.key(1), len(out))
        pairs = zip(keys, out)
        return sum(jnp.sum(jr.normal(k, x.shape) * x.astype(float)) for k, x in pairs)

    of_inputs, of_trained = jax.grad(loss, (0, 1))(inputs, trained)
    return _arrays(of_inputs), _arrays(of_trained)


def _difference(new: list[Any], old: list[Any]) -> float:
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(new, old, strict=True)]
    sizes = [np.max(np.abs(b), initial=0) for _, b in pairs]
    # (The gradient of a bias of keys is zero, but for rounding.)
    least = max(1e-5 * max(sizes), 1e-30)
    differences = [
        np.max(np.abs(a - b), initial=0) / max(size, least)
        for (a, b), size in zip(pairs, sizes)
    ]
    assert all(map(math.isfinite, differences))
    return float(max(differences))
