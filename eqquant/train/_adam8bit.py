from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int, PyTree

from ..formats import Dynamic8
from ._moments8bit import advance, Moment, optax_library, Scalar, zeros


if TYPE_CHECKING:
    import optax


class ScaleByAdam8bitState(NamedTuple):
    """The number of steps, and for each parameter the running means of its gradient and
    of the square of that."""

    count: Int[Array, ""]
    mu: PyTree[Moment]
    nu: PyTree[Moment]


def scale_by_adam8bit(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    *,
    block_size: int = 256,
    filter_spec: PyTree = True,
    min_size: int = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.scale_by_adam` with a state of two bytes for each parameter, where that
    has eight: both moments are kept in [`eqquant.Dynamic8`][], flattened and dithered,
    the second one without a sign.

    !!! Example

        ```python
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            eqquant.train.scale_by_adam8bit(),
            optax.scale_by_learning_rate(1e-3),
        )
        ```

    **Arguments:**

    - `b1`, `b2`, `eps`, `eps_root`: as of `optax.scale_by_adam`.
    - `block_size`: how many numbers share a scale.
    - `filter_spec`: which moments to keep in 8 bits: a PyTree that is a prefix of the
        parameters, as of `eqx.partition`, of booleans and of functions from a leaf to
        a boolean. All others are kept in float32.
    - `min_size`: the moments of parameters with fewer numbers are kept in float32.
    - `embeddings`: those of the parameters of an `eqx.nn.Embedding` are too, unless
        this is true: few of its rows have a gradient at a time. (An embedding that is
        not in such a module is for `filter_spec` to leave out.)

    To `optax.inject_hyperparams`, `"block_size"` and `"min_size"` are `static_args`.

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed.

    ??? cite "Reference"

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022.
    """
    library = optax_library()
    signed, unsigned = (
        Dynamic8(block_size, signed=signed, dithered=True) for signed in (True, False)
    )

    def init(params):
        options = (filter_spec, min_size, embeddings)
        mu = zeros(params, signed, *options)
        nu = zeros(params, unsigned, *options)
        return ScaleByAdam8bitState(jnp.zeros((), jnp.int32), mu, nu)

    @jax.jit
    def step(updates, state):
        count = library.safe_increment(state.count)
        t = count.astype(jnp.float32)

        def one(g, m, v):
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g**2
            root = jnp.sqrt(v / (1 - b2**t) + eps_root)
            return m / (1 - b1**t) / (root + eps), m, v

        leaves, treedef = jtu.tree_flatten(updates)
        moments = map(treedef.flatten_up_to, (state.mu, state.nu))
        found = [advance(one, *operands) for operands in zip(leaves, *moments)]
        updates, mu, nu = (
            treedef.unflatten([new[i] for new in found]) for i in range(3)
        )
        return updates, ScaleByAdam8bitState(count, mu, nu)

    def update(updates, state, params=None):
        del params
        return step(updates, state)

    return library.GradientTransformation(init, update)


def adamw8bit(
    learning_rate: Scalar | Callable[[Any], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    block_size: int = 256,
    filter_spec: PyTree = True,
    min_size: int = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.adamw` with a state of two bytes for each parameter.

    !!! Example

        ```python
        optimizer = eqquant.train.adamw8bit(1e-3)
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        ```

    **Arguments:**

    - `learning_rate`, `b1`, `b2`, `eps`, `eps_root`, `weight_decay`, `mask`: as of
        `optax.adamw`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as of
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed.
    """
    library = optax_library()
    return library.chain(
        scale_by_adam8bit(
            b1,
            b2,
            eps,
            eps_root,
            block_size=block_size,
            filter_spec=filter_spec,
            min_size=min_size,
            embeddings=embeddings,
        ),
        library.add_decayed_weights(weight_decay, mask),
        library.scale_by_learning_rate(learning_rate),
    )
