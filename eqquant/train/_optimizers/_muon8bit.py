import functools as ft
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TYPE_CHECKING, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Int, PyTree

from ..._product import by_types
from ...formats import Dynamic8
from ._adam import adamw8bit
from ._moments import (
    chained,
    Moment,
    optax_library,
    Scalar,
    Size,
    static,
    Storage,
    unbiased,
)
from ._quantized_state import quantized_state


if TYPE_CHECKING:
    import optax


_Coefficients: TypeAlias = tuple[Scalar, Scalar, Scalar]
_Preconditioning: TypeAlias = Literal["frobenius", "spectral", "aol", "schatten"]


class ScaleByMuon8bitState(NamedTuple):
    """The step count, and the running mean of each parameter's gradient."""

    count: Int[Array, ""]
    mu: PyTree[Moment]


def scale_by_muon8bit(
    ns_coeffs: _Coefficients | tuple[_Coefficients, ...] = (3.4445, -4.7750, 2.0315),
    ns_steps: Size = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: _Preconditioning = "frobenius",
    weight_dimension_numbers: Any = None,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.contrib.scale_by_muon` with a state of one byte per parameter instead of
    four. The momentum is flattened and stored in [`eqquant.Dynamic8`][] with dithered
    rounding. The momentum is orthogonalized before it is rounded.

    **Arguments:**

    - `ns_coeffs`, `ns_steps`, `beta`, `eps`, `nesterov`, `adaptive`, `preconditioning`:
        as in `optax.contrib.scale_by_muon`.
    - `weight_dimension_numbers`: an `optax.contrib.MuonDimensionNumbers` for each
        parameter: a prefix PyTree of them, or a function from parameters to one. By
        default, every parameter is a matrix.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    To compile `init` or `update` under `optax.inject_hyperparams`, pass `"ns_steps"`,
    `"block_size"` and `"min_size"` as `static_args`.

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed. `init` raises a `ValueError` for
    complex parameters, and for parameters of fewer than two axes.

    ??? cite "Reference"

        Muon: An optimizer for hidden layers in neural networks. Jordan et al., 2024.

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022.
    """
    storage = Storage(Dynamic8, block_size, filter_spec, min_size, embeddings)
    decays, state_type = (beta, 1 - beta), ScaleByMuon8bitState
    momentum = quantized_state(_one, decays, state_type, storage, (True,), (nesterov,))

    def init(params):
        jtu.tree_map(_check, params)
        return momentum.init(params)

    def update(updates, state, params=None):
        updates, state = momentum.update(updates, state, params)
        dimensions = _extended(weight_dimension_numbers, updates)
        leaves, treedef = jtu.tree_flatten(dimensions)
        how = static("ns_steps", ns_steps), adaptive, preconditioning
        numbers = ns_coeffs, eps
        return _orthogonalize(updates, numbers, how, (tuple(leaves), treedef)), state

    return optax_library().GradientTransformation(init, update)


# At module level, with every number an argument: see `_step` in `_quantized_state.py`.
@ft.partial(jax.jit, static_argnums=(2, 3))
def _orthogonalize(updates, numbers, how, dimensions):
    leaves, treedef = dimensions
    one = ft.partial(_orthogonalized, numbers, *how)
    return jtu.tree_map(one, updates, treedef.unflatten(leaves))


def _orthogonalized(numbers, ns_steps, adaptive, preconditioning, x, dimensions):
    def run(numbers, x):
        ns_coeffs, eps = numbers
        # With a decay of zero, optax's own momentum is the update, and its state
        # constant.
        scale_by_muon = optax_library().contrib.scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta=0.0,
            eps=eps,
            nesterov=False,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=dimensions,
        )
        return scale_by_muon.update(x, scale_by_muon.init(x))[0]

    # With shardings in types, the products of optax would be ambiguous.
    return by_types(run, jax.typeof(x).sharding)(numbers, x)


def _check(x):
    if np.ndim(x) < 2:
        raise ValueError(
            "`params` should be matrices, or arrays of more axes with "
            f"`weight_dimension_numbers`. Got an array of shape {np.shape(x)}. "
            "`eqquant.train.muon8bit` trains such ones by AdamW."
        )


def _one(nesterov, options, g, m):
    t, beta, rest = options
    m = beta * m + rest * g
    return unbiased(m, g, t, beta, rest, nesterov), m


def muon8bit(
    learning_rate: Scalar | Callable[[Any], Any],
    ns_coeffs: _Coefficients | tuple[_Coefficients, ...] = (3.4445, -4.7750, 2.0315),
    ns_steps: Size = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: _Preconditioning = "frobenius",
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: Scalar = 0.0,
    adam_learning_rate: Scalar | Callable[[Any], Any] | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: Scalar | None = None,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.contrib.muon` with a state of one byte per parameter of matrices. All
    other parameters are trained by [`eqquant.train.adamw8bit`][].

    The weights of `eqx.nn.Linear` have their outputs first, which affects the scale of
    updates:

    !!! Example

        ```python
        def dimensions(params):
            outputs_first = optax.contrib.MuonDimensionNumbers(1, 0)
            is_matrix = lambda x: outputs_first if x.ndim == 2 else None
            return jax.tree.map(is_matrix, params)

        optimizer = eqquant.train.muon8bit(
            0.02, adam_learning_rate=1e-3, muon_weight_dimension_numbers=dimensions
        )
        ```

    **Arguments:**

    - `learning_rate`, `ns_coeffs`, `ns_steps`, `beta`, `eps`, `weight_decay`,
        `weight_decay_mask`, `nesterov`, `adaptive`, `preconditioning`, `adam_b1`,
        `adam_b2`, `adam_eps_root`, `adam_weight_decay`, `adam_learning_rate`,
        `muon_weight_dimension_numbers`, `consistent_rms`: as in `optax.contrib.muon`,
        except that `ns_coeffs` are numbers, not a name.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    The errors of [`eqquant.train.scale_by_muon8bit`][].
    """
    library = optax_library()
    stored: dict[str, Any] = dict(
        block_size=block_size,
        filter_spec=filter_spec,
        min_size=min_size,
        embeddings=embeddings,
    )
    given = muon_weight_dimension_numbers
    given = _dimensions_of_matrices if given is None else given
    scale_by_muon = scale_by_muon8bit(
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        nesterov=nesterov,
        adaptive=adaptive,
        preconditioning=preconditioning,
        weight_dimension_numbers=given,
        **stored,
    )
    scaled = ft.partial(_scaled_by_shape, consistent_rms)
    scale_by_shape = library.stateless(
        lambda updates, _: jtu.tree_map(scaled, updates, _extended(given, updates))
    )
    scale_by = library.chain(scale_by_muon, scale_by_shape)
    adam = adamw8bit(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        eps,
        adam_eps_root,
        adam_weight_decay,
        nesterov=nesterov,
        **stored,
    )
    muon = chained(scale_by, learning_rate, weight_decay, weight_decay_mask)
    label = lambda dimensions: "adam" if dimensions is None else "muon"
    return library.partition(
        {"muon": muon, "adam": adam}, lambda params: _extended(given, params, label)
    )


def _dimensions_of_matrices(params):
    numbers = optax_library().contrib.MuonDimensionNumbers()
    return jtu.tree_map(lambda x: numbers if np.ndim(x) == 2 else None, params)


def _scaled_by_shape(consistent_rms, x, dimensions):
    sizes = lambda axes: math.prod(x.shape[i] for i in np.atleast_1d(axes))
    fan_in, fan_out = map(sizes, dimensions)
    if consistent_rms is None:
        # (An empty array has no updates to scale.)
        scale = math.sqrt(max(1, fan_out / max(1, fan_in)))
    else:
        scale = math.sqrt(max(fan_in, fan_out)) * consistent_rms
    return (scale * x).astype(x.dtype)


def _extended(given, params, fn=lambda dimensions: dimensions):
    """Applies `fn` to each parameter's dimension numbers, which are given as a prefix
    PyTree, or by a function."""
    numbers = optax_library().contrib.MuonDimensionNumbers
    # A PyTree may also be callable, such as an MLP.
    is_function = callable(given) and jtu.all_leaves([given])
    if given is None:
        given = numbers()
    elif is_function:
        # (It returns none for a single array that is not a matrix.)
        given = given(params)
    extend = lambda d, subtree: jtu.tree_map(lambda _: fn(d), subtree)
    is_leaf = lambda x: x is None or isinstance(x, numbers)
    return jtu.tree_map(extend, given, params, is_leaf=is_leaf)
