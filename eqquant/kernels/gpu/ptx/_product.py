import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float

from ....formats import (
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGGUFBytes,
    AbstractGrid,
    from_bits,
    round_trip,
    Stored,
)
from ..._adapted import of_base, on_base, reads_byte_scales
from ..._finite import infinite_as_nan
from ..._problem import Problem
from ..._table import register_kernel
from .._devices import ampere, capability, hopper
from .._float import reads_packed
from .._parts import in_parts
from .._seconds import rates
from . import _nvrtc as nvrtc
from ._blocks import kind_of_blocks
from ._cache import ptx_of
from ._call import call
from ._kind import Kind, kind_of_grid
from ._plan import group, Plan, plan, tile


@reads_byte_scales
def bfloat16_mma(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes codes to bfloat16 in registers, which tensor cores multiply (`mma.sync`),
    and accumulates in float32. Scales are applied to sums, or, if blocks are small, to
    numbers. Inputs in float16 are sums of two numbers of bfloat16, and those in float32
    of three. NVRTC compiles it when a program is traced. Its instructions were counted,
    and its results checked in an emulator: it was never timed, nor run on a GPU.

    Where blocks have minima, an infinite input may give NaN.
    """
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    if problem.row_axis == -2:
        return _product(x, stored, problem)
    return in_parts(_product)(x, stored, problem)


def _product(x, stored, problem):
    kind = kind_of(problem)
    assert kind is not None
    m, rows = x.shape[0], problem.layout.to_rows(stored)
    parts = parts_of(x)
    first, *others = (rows[name] for name in kind.operands)
    codes = lax.bitcast_convert_type(first, jnp.uint8)
    n, j = codes.shape
    made = plan(n, j, kind, problem.stack)
    # (A lane loads whole words.)
    codes = jnp.pad(codes, ((0, 0), (0, -j % kind.load_bytes)))
    # (Zero-points may be shared by all rows where scales are not.)
    operands = [codes, *(jnp.broadcast_to(a, others[0].shape) for a in others)]
    inputs = in_order(jnp.concatenate(parts), kind, made)
    # (In calls of about the same number of rows, mostly of the same program.)
    calls = -(-len(inputs) // kind.most_rows)
    most = -(-len(inputs) // (calls * group)) * group
    some = [inputs[i : i + most] for i in range(0, len(inputs), most)]
    products = [_products([*operands, x], kind, made) for x in some]
    y = jnp.concatenate(products, axis=-2)
    y = jnp.sum(y.reshape(made.splits * len(parts), m, n), axis=0)
    return _scaled(y, rows, kind, problem).astype(problem.dtype)


def _scaled(y, rows, kind, problem):
    """Applies the scales that the kernel has not applied: of rows, or of all rows."""
    if (scales := problem.byte_scales) is not None and scales.factor is not None:
        factor = from_bits(rows[scales.factor], np.dtype(np.float32)).reshape(())
        return y / factor if scales.inverse else y * factor
    if kind.scales_rows:
        scale = from_bits(rows["scale"], _grid(problem).scale_dtype)[:, 0]
        y = y * infinite_as_nan(scale)[None]
    return y


# For more rows, decoding the weight once takes less time. (See `_seconds`.)
_most_rows = 256


def parts_of(x: Float[Array, "m k"]) -> list[BFloat16[Array, "m k"]]:
    """Splits `x` into arrays of bfloat16 that add up to it: 1 for bfloat16, 2 for
    float16 and 3 for float32. This is exact except for the smallest numbers of
    float32."""
    number = _number_of_parts[x.dtype.name]
    # Infinities and NaNs are not split: the first part has them.
    finite, rest = jnp.isfinite(x), x.astype(jnp.float32)
    first = rest.astype(jnp.bfloat16)
    if number == 1:
        return [first]
    parts = []
    for _ in range(number):
        # Takes the first eight of the remaining bits. (Rounding would overflow for the
        # largest numbers.)
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & np.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(jnp.where(finite, part, 0).astype(jnp.bfloat16))
        rest = rest - part
    return [jnp.where(finite, parts[0], first), *parts[1:]]


_number_of_parts = {"bfloat16": 1, "float16": 2, "float32": 3}


def in_order(
    x: BFloat16[Array, "m k"], kind: Kind, made: Plan
) -> BFloat16[Array, "m _"]:
    """Arranges inputs in the order in which the weight's numbers are decoded, and adds
    zeros beyond the last column."""
    x = jnp.pad(x, ((0, 0), (0, made.columns - x.shape[1])))
    order = np.array(kind.order)
    return x.reshape(x.shape[0], -1, len(order))[..., order].reshape(x.shape)


def _products(operands, kind, made):
    """Returns the sums of each part of the contracted axis, of shape `*b s m n`, for
    operands with leading axes `*b`."""

    @jax.custom_batching.custom_vmap
    def run(*operands):
        *stack, n, j = operands[0].shape
        x = operands[-1]
        source = source_of(
            kind,
            made,
            rows=x.shape[-2],
            n=n,
            row_bytes=j,
            scale_shape=operands[1].shape[-2:],
        )
        shape = (*stack, made.splits, x.shape[-2], n)
        grid = (-(-n // tile), made.splits, int(np.prod(stack, dtype=int)))
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        program = ptx_of(source, capability())
        return call(program, name, result, grid=grid, block=32 * made.warps)(*operands)

    @run.def_vmap
    def _(size, batched, *operands):
        whole = [
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            for a, is_batched in zip(operands, batched)
        ]
        return run(*whole), True

    return run(*operands)


# The name of the kernel in every program.
name = "eqquant_product"


def source_of(
    kind: Kind,
    made: Plan,
    *,
    rows: int,
    n: int,
    row_bytes: int,
    scale_shape: tuple[int, int],
) -> str:
    """Returns the source of the program for a product. The sizes of the product are
    constants in it, and `BLOCKS` is the number of blocks for which a multiprocessor
    should have room. `scale_shape` is ignored if there are no arrays of scales."""
    columns = kind.scale_columns
    blocks = 1 if columns is None else scale_shape[1]
    sizes = dict(
        rows=rows,
        n=n,
        columns=made.columns,
        row_bytes=row_bytes,
        steps=made.steps,
        # (Zero if a step has several blocks.)
        steps_of_block=made.steps if columns is None else columns // kind.step_columns,
        blocks=blocks,
        scales_of_row=0 if scale_shape[0] == 1 and n > 1 else blocks,
        splits=made.splits,
    )
    groups = -(-rows // group)
    arguments = (kind.weight, groups, made.warps, made.ahead)
    _, *others = kind.operands
    parameters = [
        f"const P::W::{kind} *{name}" for kind, name in zip(("Scale", "Shift"), others)
    ]
    missing = ["nullptr"] * (2 - len(others))
    return (
        '#include "product.cuh"\n'
        f"{kind.source}"
        f"using P = Product<{', '.join(map(str, arguments))}>;\n"
        f'extern "C" __global__ void __launch_bounds__({32 * made.warps}, BLOCKS)\n'
        f"{name}({', '.join(['const unsigned char* codes', *parameters])}, "
        "const Vector* x, float* y) {\n"
        f"  P::run({', '.join(['codes', *others, *missing])}, x, y,\n"
        f"         Sizes{{{', '.join(map(str, sizes.values()))}}});\n"
        "}\n"
    )


def _grid(problem):
    assert isinstance(problem.format, AbstractGrid)
    return problem.format


def kind_of(problem: Problem) -> Kind | None:
    """Returns how to read a weight, or `None` if the sources cannot."""
    if isinstance(problem.format, AbstractGGUFBlocks):
        return kind_of_blocks(problem.format)
    return kind_of_grid(_grid(problem), problem.byte_scales)


def _parts(problem):
    wide = problem.activation is not None
    return _number_of_parts["float32" if wide else problem.dtype.name]


def _supports(problem: Problem) -> str | None:
    if (reason := ampere() or nvrtc.missing()) is not None:
        return reason
    if problem.portable:
        return "is not for exported programs, in which JAX does not allow its call"
    if problem.dtype.itemsize > 4:
        return f"computes in float32 at most, got {problem.dtype.name}"
    if problem.rows is None:
        return "needs to know the number of rows when compiling"
    if problem.empty:
        return "is for operands that are not empty"
    if problem.rows > _most_rows:
        return f"is for at most {_most_rows} rows, got {problem.rows}"
    if problem.stack > _most_blocks:
        return f"is for at most {_most_blocks} weights at a time, got {problem.stack}"
    if problem.k > _most_columns:
        return f"is for rows of at most {_most_columns} numbers, got {problem.k}"
    if kind_of(problem) is None:
        return (
            "needs integers of 1 to 8 bits, a table of 16 points or `e4m3`, in "
            "blocks of 16, or of a larger power of two, that are runs of positions, or "
            f"blocks of GGUF with such parts, got {problem.format}"
        )
    return None


def _supports_base(problem: Problem) -> str | None:
    if isinstance(problem.format, AbstractGGUFBlocks) and kind_of(problem) is not None:
        return "reads blocks as they are stored"
    return _supports(of_base(problem))


# CUDA's limit for all axes of a grid but the first.
_most_blocks = 65535
# Keeps offsets in the rows of inputs within 32 bits.
_most_columns = 2**24


def error(problem: Problem) -> float:
    """Returns the bound on the error of a product."""
    # Tensor cores do not round sums to nearest. (Their error is not documented.) Minima
    # are added to sums, and may cancel most of them.
    if (kind := kind_of(problem)) is None:
        return 4e-3
    return (1e-3 if kind.adds_inputs else 1e-4) + 1.01 * kind.error


def _seconds(problem: Problem) -> float:
    # Estimated from the memory bandwidth and the instructions that the GPU issues, of
    # which a loop issues 70 %. The tests count the instructions for each number.
    kind, now = kind_of(problem), rates()
    assert problem.rows is not None and kind is not None
    nbytes = kind.step_bytes / kind.step_columns
    if problem.row_axis != -2:
        nbytes += 2 * nbytes
    rows = problem.rows * _parts(problem)
    groups = -(-min(rows, kind.most_rows) // group)
    instructions = (2.7 + groups / 3) / 0.7
    each = max(nbytes / now.bytes, instructions / now.instructions)
    seconds, calls = each, -(-rows // kind.most_rows)
    if calls > 1:
        # Loads of `x` and the tensor cores are busy, too: twice the time of the
        # instructions, as in published kernels of this kind.
        seconds = 2 * calls * each
    # Until this kernel is timed, it counts as slower than the kernels that were timed
    # on Hopper, where these need no pass over the weight to unpack codes.
    is_timed = hopper() is None and reads_packed(problem.format)
    return problem.numbers * seconds * (3 if is_timed else 1)


def _seconds_of_blocks(problem: Problem) -> float:
    # XLA writes the codes, and a scale and a minimum for each part, and the kernel
    # reads them back.
    base = of_base(problem)
    nbytes = base.format.bits / 8 + 8 / (base.format.block_size or base.k)
    return _seconds(base) + problem.numbers * 2 * nbytes / rates().bytes


_register = ft.partial(
    register_kernel, "matmul", platform="cuda", activation=(None, AbstractFormat)
)
_register(
    (AbstractGrid, AbstractGGUFBlocks),
    supports=_supports,
    error=error,
    seconds=_seconds,
)(bfloat16_mma)
# (XLA unpacks the blocks of other types.)
_register(
    AbstractGGUFBytes,
    supports=_supports_base,
    error=lambda problem: error(of_base(problem)),
    seconds=_seconds_of_blocks,
)(in_parts(on_base(bfloat16_mma)))
