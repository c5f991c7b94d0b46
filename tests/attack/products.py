from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from . import inputs, weights
from .case import Case
from .formats import draw_activation, draw_multiplied, draw_often, name_of
from .oracle import loosened, product, wrong
from .problems import highest_error, kernels, largest_error, problem_of
from .transforms import fits, transforms


_sizes = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 80, 96, 100, 128, 129)
_sizes += (160, 240, 256, 257, 320, 512)
_rows = (1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 40)
# Above the size from which on kernels round.
_large = ((1024, 272), (512, 640), (300, 900), (2048, 130), (257, 1025), (768, 512))
_dtypes = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)


class Drawn(NamedTuple):
    """What one program is compiled for."""

    format: eqq.AbstractFormat
    activation: eqq.AbstractFormat | None
    shape: tuple[int, ...]
    axis: int
    flipped: bool
    platform: str | None
    w_dtype: Any
    x_dtype: Any
    rows: int
    transform: str

    def weight(self, case: Case, kind: str) -> eqq.QuantizedArray:
        q = weights.draw_quantized(
            case,
            self.format,
            self.shape,
            kind,
            self.w_dtype,
            axis=self.axis,
            activation=self.activation,
        )
        if self.platform is not None:
            here = self.platform == "this"
            q = eqq.tree_prepack(q, None if here else self.platform)
        return q.mT if self.flipped else q


def _draw(case: Case) -> Drawn:
    stack = case.pick(((), (), (), (), (3,), (2, 3), (1, 2)))
    format, rows = draw_multiplied(case), case.pick(_rows)
    if case.chance(0.35):
        size, stack = case.pick(_large), case.pick(((), (), (2,)))
        format, rows = draw_often(case), case.pick((1, 8, 17, 32, 40))
    elif case.chance(0.03):
        size = case.pick(((0, 5), (5, 0), (0, 0), (33, 0)))
    else:
        size = (case.pick(_sizes), case.pick(_sizes))
    fitting = [name for name, t in transforms.items() if fits(t, stack)]
    return Drawn(
        format=format,
        activation=draw_activation(case),
        shape=(*stack, *size),
        axis=case.pick((-2, -1)),
        flipped=case.chance(0.4),
        platform=case.pick((None, None, None, "this", "this", "cpu", "gpu", "tpu")),
        w_dtype=case.pick(_dtypes),
        x_dtype=case.pick(_dtypes),
        rows=0 if case.chance(0.02) else rows,
        transform=case.pick(fitting),
    )


def products(case: Case) -> None:
    """`x @ q` by each kernel that can do it, by default, with the highest precision,
    and under a transformation."""
    drawn = _draw(case)
    q = drawn.weight(case, "normal")
    *stack, k, n = q.shape
    x_shape, v_shape = (*stack, drawn.rows, k), (*stack, drawn.rows, n)
    problem = problem_of(jax.ShapeDtypeStruct(x_shape, drawn.x_dtype), q)
    run = _compiled(drawn, [kernel.name for kernel in kernels(problem)])
    for _ in range(4):
        x_kind, w_kind = case.pick(inputs.kinds), case.pick(weights.kinds)
        x = inputs.draw_inputs(case, x_shape, x_kind, drawn.x_dtype)
        v = inputs.draw_inputs(case, v_shape, x_kind, drawn.x_dtype)
        q = drawn.weight(case, w_kind)
        names = dict(
            kind="product",
            format=name_of(drawn.format),
            inputs=x_kind,
            weights=w_kind,
        )
        _check(case, drawn, problem, run(x, v, q), x, v, q, names)
        if drawn.transform == "jit":
            _check_eager(case, problem, x, q, names)


def _compiled(drawn: Drawn, every: list[str]):
    transform = transforms[drawn.transform]

    @jax.jit
    def run(x, v, q):
        by_name = {name: eqq.qmatmul(x, q, kernel=name) for name in every}
        highest = eqq.qmatmul(x, q, precision="highest")
        return by_name, highest, transform.fn(x, v, q)

    return run


def _check(case, drawn, problem, found, x, v, q, names):
    by_name, highest, transformed = found
    w = weights.dense(q)
    acted = rounded(x, drawn.activation)
    expected = product(acted, w)

    def check(y, expected, error, provided, a, b, **more):
        # Of weights that are zero where the inputs are large, some say nothing.
        if provided and names["weights"] in weights.sparse:
            expected = loosened(a, b, expected)
        case.check(f"{_about(drawn, q)}", wrong(y, expected, error), **names, **more)

    for kernel in kernels(problem):
        y = by_name[kernel.name]
        bound = kernel.bound(problem), kernel.provided
        check(y, expected, *bound, acted, w, kernel=kernel.name, transform="jit")
    bound = highest_error(problem), ""
    check(highest, expected, *bound, acted, w, kernel="highest", transform="jit")

    transform = transforms[drawn.transform]
    bound = largest_error(problem, transform.flips, transform.rounds)
    if bound[1] and len(transform.flips) > 1 and names["weights"] in weights.sparse:
        return  # Nothing is declared of two products with such weights.
    a = acted if transform.rounds else np.asarray(x, np.float64)
    expected = transform.expected(a, np.asarray(v, np.float64), w)
    a, b = (v, w.swapaxes(-1, -2)) if transform.flips == (True,) else (a, w)
    check(transformed, expected, *bound, a, b, transform=drawn.transform)


def _check_eager(case, problem, x, q, names):
    expected, (error, provided) = (
        product(rounded(x, q.activation), weights.dense(q)),
        largest_error(problem),
    )
    if not provided:
        y = x @ q
        case.check(
            f"{x.shape} {q}", wrong(y, expected, error), **names, transform="eager"
        )


@jax.jit(static_argnums=1)
def _round_trip(x, format):
    # (Traced, so that what is not finite becomes NaN, and is no error.)
    return eqq.quantize(x.astype(jnp.float32), format, axis=-1).dequantize()


def rounded(x, activation):
    if activation is not None:
        x = _round_trip(x, activation)
    return np.asarray(x, np.float64)


def _about(drawn, q):
    parts = [f"{drawn.rows} rows of {jnp.dtype(drawn.x_dtype).name}", f"{q}"]
    if drawn.platform is not None:
        parts.append(f"prepacked for {drawn.platform}")
    return ", ".join(parts)
