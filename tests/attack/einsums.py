import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqquant as eqq

from .case import Case
from .same import same


class _Einsum(eqx.Module):
    kernel: jax.Array
    equation: str = eqx.field(static=True)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.kernel)


def einsums(case: Case) -> None:
    """Weights of any axes, of a layer of one's own: what an example tells of them; what
    becomes of them with adapters; and in a file that is loaded into a dense model."""
    equation, of_x, shape, axes = _draw(case)
    x, w = (jnp.asarray(case.rng.standard_normal(s), "float32") for s in (of_x, shape))
    dense, names = _Einsum(w, equation), dict(kind="einsums")
    about = f"{equation} of {shape}"
    q = eqq.tree_quantize(dense, "int8", example=x, min_size=0)
    found = q.kernel.axis if isinstance(q.kernel.axis, tuple) else (q.kernel.axis,)
    along = {i % len(shape) for i in found if shape[i] != 1}
    wanted = {i for i in axes if shape[i] != 1}
    case.expect(f"{about}: axes {found}", along == wanted, **names)
    _check(case, f"{about}: product", q(x), equation, x, q.kernel.dequantize())

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        eqq.save(path, q)
        loaded = eqq.load(path, like=dense)
    case.expect(f"{about}: loaded", same(loaded, q), **names)

    adapted, _ = eqq.train.lora(q, 2, min_size=0, key=jr.key(case.number))
    b = jnp.asarray(case.rng.standard_normal(adapted.kernel.b.shape), "float32")
    adapted = eqx.tree_at(lambda m: m.kernel.b, adapted, b)
    rank = np.linalg.matrix_rank(_rows(adapted, q, found), tol=1e-3)
    # (Behind an axis of size one, what is before may be a stack.)
    holds = rank <= 2 or 1 in shape
    case.expect(f"{about}: rank {rank}", holds, **names)
    run = eqx.filter_jit(lambda m, x: m(x))
    _check(case, f"{about}: adapted", run(adapted, x), equation, x, adapted.kernel)


def _draw(case):
    # The rows are before or behind the axes that are contracted, which are together.
    ins = "abc"[: case.integer(1, 2)]
    behind = case.chance(0.6)
    outs = "uvw"[: case.integer(1, 3 if behind else 1)]
    of_w = ins + outs if behind else outs + ins
    of_x = "xy"[: case.integer(1, 2)] + "".join(case.rng.permutation([*ins]))
    sizes = {letter: case.pick((1, 3, 8, 16, 33)) for letter in ins + outs + "xy"}
    if all(sizes[letter] == 1 for letter in ins):
        sizes[ins[0]] = 16
    result = "".join(case.rng.permutation([*of_x.strip(ins), *outs]))
    shape = lambda letters: tuple(sizes[letter] for letter in letters)
    axes = [of_w.index(letter) for letter in ins]
    return f"{of_x},{of_w}->{result}", shape(of_x), shape(of_w), axes


def _rows(adapted, q, axes):
    # What the adapter adds, as a matrix, by NumPy.
    w = adapted.kernel
    more = np.asarray(w.dequantize(), float) - np.asarray(q.kernel.dequantize(), float)
    axes = sorted(i % more.ndim for i in axes)
    more = np.moveaxis(more, axes, range(len(axes)))
    return more.reshape(int(np.prod(more.shape[: len(axes)])), -1)


def _check(case, about, y, equation, x, w):
    w = w if isinstance(w, jax.Array | np.ndarray) else w.dequantize()
    x, w = np.asarray(x, float), np.asarray(w, float)
    expected = np.einsum(equation, x, w)
    bound = np.einsum(equation, np.abs(x), np.abs(w)) + 1e-6
    error = np.max(np.abs(np.asarray(y, float) - expected) / bound, initial=0.0)
    found = None if error < 3e-5 else f"off by {error:.1e} of |x| |w|"
    case.check(about, found, kind="einsums")
