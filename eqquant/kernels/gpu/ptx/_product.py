import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float

from ....formats import AbstractFormat, AbstractGrid, from_bits, round_trip, Stored
from ..._finite import infinite_as_nan
from ..._problem import Problem
from ..._table import register_kernel
from .._devices import ampere, hopper
from . import _nvrtc as nvrtc
from ._cache import ptx_of
from ._call import call
from ._kind import Kind, kind_of, scales_of
from ._plan import bytes_of_lane, group, most_rows, Plan, plan, tile


def bfloat16_mma(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes codes to bfloat16 in registers, which tensor cores multiply (`mma.sync`),
    and accumulates in float32. Scales are applied to sums. Inputs in float16 are sums
    of two numbers of bfloat16, and those in float32 of three. NVRTC compiles it when a
    program is traced. Its instructions were counted, and its results checked in an
    emulator: it was never timed, nor run on a GPU.
    """
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    format, kind = _grid(problem), _kind(problem)
    m, rows = x.shape[0], problem.layout.to_rows(stored)
    parts = parts_of(x)
    codes = lax.bitcast_convert_type(rows["codes"], jnp.uint8)
    n, j = codes.shape
    made = plan(len(parts) * m, n, j, format.block_size, kind.bits, problem.stack)
    codes = jnp.pad(codes, ((0, 0), (0, -j % made.nbytes)))
    operands = [codes]
    if format.block_size is not None:
        operands.append(rows["scale"])
    operands.append(in_order(jnp.concatenate(parts), kind, made))
    y = _products(operands, kind, scales_of(format), format.block_size, made)
    y = jnp.sum(y.reshape(made.splits * len(parts), m, n), axis=0)
    if format.block_size is None:
        scale = from_bits(rows["scale"], format.scale_dtype)[:, 0]
        y = y * infinite_as_nan(scale)[None]
    return y.astype(problem.dtype)


def parts_of(x: Float[Array, "m k"]) -> list[BFloat16[Array, "m k"]]:
    """Numbers of bfloat16 that add up to `x`, exactly but for the smallest of float32:
    1 for bfloat16, 2 for float16 and 3 for float32."""
    number = _number_of_parts[x.dtype.name]
    # What is not finite is one number.
    finite, rest = jnp.isfinite(x), x.astype(jnp.float32)
    first = rest.astype(jnp.bfloat16)
    if number == 1:
        return [first]
    parts = []
    for _ in range(number):
        # The first eight bits of those that are left. (By rounding, the largest would
        # overflow.)
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & np.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(jnp.where(finite, part, 0).astype(jnp.bfloat16))
        rest = rest - part
    return [jnp.where(finite, parts[0], first), *parts[1:]]


_number_of_parts = {"bfloat16": 1, "float16": 2, "float32": 3}


def in_order(
    x: BFloat16[Array, "m k"], kind: Kind, made: Plan
) -> BFloat16[Array, "m _"]:
    """Inputs in the order in which the codes of a word are decoded, with zeros beyond
    the last column."""
    x = jnp.pad(x, ((0, 0), (0, made.columns - x.shape[1])))
    if kind.pairs == "neighbours":
        return x
    halves = x.reshape(x.shape[0], -1, 2, 16 // kind.bits)
    return halves.swapaxes(2, 3).reshape(x.shape)


def _products(operands, kind, scales, block, made):
    """The sums of each part of the contracted axis, `*b s m n`, of operands with
    leading axes `*b`."""

    @jax.custom_batching.custom_vmap
    def run(*operands):
        *stack, n, j = operands[0].shape
        x = operands[-1]
        source = source_of(
            kind,
            scales,
            made,
            rows=x.shape[-2],
            n=n,
            row_bytes=j,
            scale_shape=operands[1].shape[-2:],
            block=block,
        )
        shape = (*stack, made.splits, x.shape[-2], n)
        grid = (-(-n // tile), made.splits, int(np.prod(stack, dtype=int)))
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        program = ptx_of(source)
        return call(program, name, result, grid=grid, block=32 * made.warps)(*operands)

    @run.def_vmap
    def _(size, batched, *operands):
        whole = [
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            for a, is_batched in zip(operands, batched)
        ]
        return run(*whole), True

    return run(*operands)


# Of the kernel in a program.
name = "eqquant_product"


def source_of(
    kind: Kind,
    scales: str,
    made: Plan,
    *,
    rows: int,
    n: int,
    row_bytes: int,
    scale_shape: tuple[int, int],
    block: int | None,
) -> str:
    """The program of a product, whose sizes are constants of it."""
    blocks = 1 if block is None else scale_shape[1]
    step = 4 * made.nbytes * 8 // kind.bits
    sizes = dict(
        rows=rows,
        n=n,
        columns=made.columns,
        row_bytes=row_bytes,
        steps=made.steps,
        steps_of_block=1 if block is None else block // step,
        blocks=blocks,
        scales_of_row=0 if scale_shape[0] == 1 and n > 1 else blocks,
        splits=made.splits,
    )
    scaled = block is not None
    table = ""
    if kind.table:
        bits = ", ".join(map(hex, kind.table))
        table = (
            f"CONSTANT unsigned short points[16] = {{{bits}}};\n"
            "struct Points { ON_LANE static Word bits(int i) { return points[i]; } };\n"
        )
    arguments = f"{made.nbytes}, {made.groups}, {made.warps}, {made.ahead}"
    return (
        '#include "product.cuh"\n'
        f"{table}"
        f'extern "C" __global__ void __launch_bounds__({32 * made.warps})\n'
        f"{name}(const unsigned char* codes, "
        f"{'const void* scales, ' if scaled else ''}const Vector* x, float* y) {{\n"
        f"  Product<{kind.codes}, {scales}, {arguments}>::run(\n"
        f"      codes, {'scales' if scaled else 'nullptr'}, x, y,\n"
        f"      Sizes{{{', '.join(map(str, sizes.values()))}}});\n"
        "}\n"
    )


def _grid(problem):
    assert isinstance(problem.format, AbstractGrid)
    return problem.format


def _kind(problem):
    kind = kind_of(_grid(problem))
    assert kind is not None
    return kind


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
    if 0 in (problem.rows, problem.n, problem.k):
        return "is for operands that are not empty"
    most = most_rows // _parts(problem)
    if problem.rows > most:
        of = "quantized" if problem.activation is not None else problem.dtype.name
        return f"is for at most {most} rows of {of} inputs, got {problem.rows}"
    if problem.stack > _most_blocks:
        return f"is for at most {_most_blocks} weights at a time, got {problem.stack}"
    format = _grid(problem)
    kind = kind_of(format)
    if kind is None:
        return (
            "needs integers of 2, 4 or 8 bits or a table of 16 points, without "
            f"offsets, got {format}"
        )
    if bytes_of_lane(format.block_size, kind.bits) is None:
        return f"needs larger blocks, of a power of two, got {format}"
    return None


# Along all axes of a grid but the first.
_most_blocks = 65535


def error(problem: Problem) -> float:
    # Tensor cores do not round sums to nearest. (By how much they are off is not
    # documented.) A table in bfloat16 is off by up to a 512th.
    return 1e-4 if _kind(problem).exact else 4e-3


def _seconds(problem: Problem) -> float:
    # By the memory and the instructions of an H100: 3 TB/s, and 2.9e13 instructions in
    # a second, of which a loop issues 70 %. The tests count those of each number.
    assert problem.rows is not None
    nbytes = problem.format.bits / 8
    if problem.row_axis != -2:
        nbytes += 2 * nbytes
    groups = -(-problem.rows * _parts(problem) // group)
    seconds = max(nbytes / 3e12, (2.7 + groups / 3) / 2e13)
    # Until it is timed, it is held to be slower than those that were, on Hopper.
    return problem.numbers * seconds * (3 if hopper() is None else 1)


register_kernel(
    "matmul",
    AbstractGrid,
    "cuda",
    activation=(None, AbstractFormat),
    supports=_supports,
    error=error,
    seconds=_seconds,
)(bfloat16_mma)
