import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...formats import AbstractFormat, Stored, Trellis
from .._digits import error, provided
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ..cpu._codes import refuse_layout
from ..cpu._costs import measured
from ..cpu._tiles import refuse_small
from . import _library as library
from ._weight import refuse_library


def _multiply(product, x, stored, problem):
    format, k = problem.format, problem.k
    assert isinstance(format, Trellis)
    columns = problem.n if problem.product == "matmul" else k
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    function = jax.ffi.ffi_call(
        "eqquant_trellis_product", result, vmap_method="broadcast_all"
    )
    y = function(
        x,
        stored["codes"],
        stored["scale"],
        product=np.int32(library.number(f"product.{product}")),
        bits=np.int32(format.bits),
        states=np.int32(format.states),
        scale_type=np.int32(library.number(f"scale.{format.scale_dtype.name}")),
        k=np.int64(k),
        set=np.int32(library.number_of_set()),
    )
    return y.astype(problem.dtype)


def native_trellis(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes trellis codes in registers, and multiplies and adds in float32."""
    x = rounded_inputs(x, problem)
    product = "trellis" if problem.product == "matmul" else "trellis_across"
    return _multiply(product, x, stored, problem)


def native_trellis_integers(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs to 16-bit integers in a unit of their row, and multiplies them
    by the integers that trellis codes stand for. Scales are applied to sums of these.
    Inputs far above the others of their row are multiplied in float32, as are rows with
    many of those."""
    # (For the bound, see `native_decoded_integers`.)
    return _multiply("trellis_int16", x.astype(jnp.float32), stored, problem)


def _refuse(problem: Problem) -> str | None:
    return refuse_library(problem) or refuse_layout(problem)


def _rounds(problem: Problem) -> str | None:
    if reason := _refuse(problem):
        return reason
    if not library.has("trellis_int16"):
        return "needs a CPU with 16-bit integer products"
    return refuse_small(problem)


register_kernel(
    ("matmul", "matmul_transposed"),
    Trellis,
    activation=(None, AbstractFormat),
    supports=_refuse,
    any_length=True,
    seconds=measured("native_trellis"),
)(native_trellis)
register_kernel(
    "matmul",
    Trellis,
    supports=_rounds,
    error=error,
    provided=provided,
    any_length=True,
    seconds=measured("native_trellis_integers"),
)(native_trellis_integers)
