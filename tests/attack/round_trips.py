import operator
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqquant as eqq

from . import weights
from .case import Case
from .formats import draw_activation, draw_format, name_of


_shapes = ((48,), (33, 20), (64, 48), (5, 129), (3, 32, 17), (2, 3, 65, 8), (1, 1))
_shapes += ((0, 16), (16, 0), (2, 0, 5), (256, 33), (4, 3, 3, 8))
_dtypes = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)


def round_trips(case: Case) -> None:
    """What holds of an array and of what it stands for, bit for bit."""
    format, shape = draw_format(case), case.pick(_shapes)
    kind, dtype = case.pick(weights.kinds[:-2]), case.pick(_dtypes)
    axis = case.integer(-min(2, len(shape)), -1)
    if len(shape) > 2 and case.chance(0.3):
        axis = case.integer(-len(shape), -1)
    w = weights.draw_weight(case, shape, kind, format, dtype)
    activation = draw_activation(case)
    q = eqq.quantize(w, format, axis=axis, activation=activation)
    names = dict(kind="round trip", format=name_of(format), weights=kind)
    d = q.dequantize()
    about = f"{q}"
    case.expect(f"{about}: shape", d.shape == q.shape == w.shape, **names)
    case.expect(f"{about}: dtype", d.dtype == q.dtype == w.dtype, **names)
    case.expect(f"{about}: finite", np.isfinite(np.asarray(d, float)).all(), **names)
    for law in (case.pick(_laws), case.pick(_laws), case.pick(_laws)):
        for what, holds in law(case, q, d, w):
            case.expect(f"{about}: {law.__name__[1:]}, {what}", holds, **names)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit, and in all that is static."""
    leaves_a, tree_a = jtu.tree_flatten(a)
    leaves_b, tree_b = jtu.tree_flatten(b)
    return tree_a == tree_b and all(map(_same_bits, leaves_a, leaves_b))


def _same_bits(a, b):
    if (np.shape(a), a.dtype) != (np.shape(b), b.dtype):
        return False
    a, b = np.asarray(a), np.asarray(b)
    return a.tobytes() == b.tobytes()


def equal(a: Any, b: Any) -> bool:
    """Whether two arrays are of the same shape, dtype and numbers."""
    if eqq.is_quantized(a):
        a = a.dequantize()
    if np.shape(a) != np.shape(b) or a.dtype != b.dtype:
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=a.dtype != bool)


def _layout(case, q, d, w):
    if isinstance(q.axis, int) and q.axis >= -2 and q.ndim > 1:
        yield "mT twice", same(q.mT.mT, q)
        yield "mT", equal(q.mT, d.mT)
    leaves, tree = jtu.tree_flatten(q)
    yield "flattened", same(tree.unflatten(leaves), q)
    yield "integers", all(jnp.issubdtype(a.dtype, jnp.integer) for a in leaves)
    yield "device_put", same(jax.device_put(q, jax.devices()[-1]), q)
    yield "jit", same(jax.jit(lambda q: q)(q), q)
    order = tuple(int(i) for i in case.rng.permutation(q.ndim))
    yield f"transpose{order}", equal(q.transpose(*order), d.transpose(*order))
    i, j = case.integer(-q.ndim, q.ndim - 1), case.integer(-q.ndim, q.ndim - 1)
    yield f"swapaxes({i}, {j})", equal(q.swapaxes(i, j), d.swapaxes(i, j))


def _prepacked(case, q, d, w):
    for platform in ("gpu", "tpu", "cpu"):
        packed = eqq.tree_prepack(q, platform)
        yield platform, equal(packed, d)
        yield (
            f"{platform} and back",
            same(eqq.tree_prepack(packed, "cpu"), eqq.tree_prepack(q, "cpu")),
        )


def _stacked(case, q, d, w):
    many = jtu.tree_map(lambda a: jnp.stack([a, a, a]), q)
    yield "stack", equal(many, jnp.stack([d, d, d]))
    for i in (0, 2, -1):
        yield f"unstack {i}", same(jtu.tree_map(lambda a: a[i], many), q)
        if q.ndim > 1:
            yield f"index {i}", equal(many[i], d)
    yield "vmap", equal(jax.vmap(lambda q: q.dequantize())(many), jnp.stack([d] * 3))


def _indexed(case, q, d, w):
    if q.size == 0:
        return
    size = q.shape[0]
    found = {
        "integer": case.integer(-size, size - 1),
        "slice": slice(case.integer(0, size), None, case.pick((None, 2, -1))),
        "array": case.rng.integers(-size, size, 3),
        "ellipsis": (..., case.integer(0, q.shape[-1] - 1)),
        "column": (slice(None), 0) if q.ndim > 1 else (slice(1, None),),
        "new axis": (None, 0),
        "mask": case.rng.random(size) < 0.5,
        "two": (0, slice(None, None, 2)) if q.ndim > 1 else (0,),
        "beyond": jnp.asarray([size + 3, -size - 2]),
    }
    for name, index in found.items():
        yield f"{name} {index}", equal(q[index], d[index])
    traced = jnp.asarray(case.integer(-2 * size, 2 * size))
    yield f"traced {traced}", equal(jax.jit(lambda q, i: q[i])(q, traced), d[traced])
    yield "len", len(q) == len(d)
    yield "iter", all(map(equal, q, d))


_arithmetic = (operator.add, operator.sub, operator.mul, operator.truediv)
_comparisons = (operator.lt, operator.le, operator.gt, operator.ge)
_equality = (operator.eq, operator.ne)


def _compared(case, q, d, w):
    others = (0, 1.5, d, np.asarray(d), jnp.asarray(0.5, d.dtype))
    for op in (*_arithmetic, *_comparisons, *_equality):
        other = case.pick(others)
        with jax.numpy_dtype_promotion("standard"):
            yield f"{op.__name__}, {_kind(other)}", _agrees(op, q, d, other)
            name = f"reflected {op.__name__}, {_kind(other)}"
            yield name, _agrees(lambda a, b: op(b, a), q, d, other)
    yield "neg", equal(-q, -d)
    yield "abs", equal(abs(q), abs(d))


def _kind(other):
    return type(other).__name__


def _agrees(op, q, d, other):
    # (A NumPy array cannot be compared with one of JAX in all dtypes.)
    expected = op(d, jnp.asarray(other, d.dtype) if np.ndim(other) else other)
    found = op(q, other)
    return eqx.is_array(found) and equal(found, expected)


def _saved(case, q, d, w):
    tree = {"a.b": q, "a": {"b": eqq.tree_prepack(q, "gpu")}, "c": [d, 1.5, "x"]}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/m.safetensors"
        eqq.save(path, tree)
        loaded, like = eqq.load(path), eqq.load(path, like=tree)
    plain = eqq.tree_prepack(tree, "cpu")
    for name, found in (("load", loaded), ("load like", like)):
        packed = eqq.tree_prepack(found["a.b"], "cpu")
        yield f"{name}, quantized", same(packed, plain["a.b"])
        yield f"{name}, nested", equal(found["a"]["b"], d)
        yield f"{name}, dense", same(found["c"][0], d)


def _again(case, q, d, w):
    absmax = (eqq.NF4, eqq.Int8, eqq.Int4)
    symmetric = getattr(q.format, "symmetric", True)
    narrow = q.dtype != jnp.float32 or q.format.__class__ not in absmax
    if narrow or not symmetric or q.format.scale_dtype != np.float32:
        return
    codes = eqq.quantize(d, q.format, axis=q.axis).stored["codes"]
    yield "codes", np.array_equal(codes, q.stored["codes"])


def _quantized_inside(case, q, d, w):
    # In a program, and mapped.
    inside = jax.jit(lambda w: eqq.quantize(w, q.format, axis=q.axis).dequantize())
    yield "jit", _close(inside(w), d)
    if w.ndim > 1 and isinstance(q.axis, int) and q.axis > -w.ndim and 0 not in w.shape:
        if name_of(q.format) in ("NVFP4", "BnbScale", "Nested") or w.ndim == 2:
            return  # what the rows of a matrix share is of one row, then
        mapped = jax.vmap(lambda w: eqq.quantize(w, q.format, axis=q.axis))(w)
        yield "vmap", _close(mapped.dequantize(), d)


def _close(a, b):
    # (Programs may divide otherwise, and round a number near a half the other way.)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    largest = np.max(np.abs(b), initial=0)
    return np.mean(np.abs(a - b) > 1e-5 * largest) < 0.01 if a.size else True


def _not_finite(case, q, d, w):
    # What is traced gives NaN over its block at least; what is not is an error.
    if q.size == 0 or isinstance(q.format, eqq.AbstractExact):
        return
    place = tuple(case.integer(0, size - 1) for size in q.shape)
    bad = w.at[place].set(case.pick((np.nan, np.inf, -np.inf)))
    inside = jax.jit(lambda w: eqq.quantize(w, q.format, axis=q.axis).dequantize())
    found = np.asarray(inside(bad), float)
    yield f"{place}", np.isnan(found[place])
    known = np.isfinite(found)
    yield "others", _close(found[known], np.asarray(d, float)[known])
    yield "error", _refuses(lambda: eqq.quantize(bad, q.format, axis=q.axis))


def _refuses(fn: Callable[[], Any]) -> bool:
    try:
        fn()
    except ValueError:
        return True
    return False


def _finite_or_refused(case, q, d, w):
    # Whatever the size of finite numbers: they come back finite, or there is an error.
    if isinstance(q.format, eqq.AbstractExact) or q.size == 0:
        return
    size = 10.0 ** case.integer(2, 38)
    large = np.clip(np.asarray(w, np.float64) * size, -3.3e38, 3.3e38)
    large = jnp.asarray(large.astype(np.float32))

    def quantized():
        return eqq.quantize(large, q.format, axis=q.axis)

    if not _refuses(quantized):
        found = np.asarray(quantized().dequantize())
        yield f"times {size:.0e}", np.isfinite(found).all()


def _of_any_size(case, q, d, w):
    # Numbers of another size lose as much, while the scales can hold them.
    scaled = isinstance(q.format, eqq.AbstractScaled) and q.dtype == jnp.float32
    if not scaled or q.size < 64 or not np.any(w) or isinstance(q.format, eqq.Nested):
        return
    scale = np.abs(np.asarray(q.scale, np.float64))
    if not np.all(scale > 1e-30) or not np.all(scale < 1e4):
        return
    # The least scale becomes 64 times the least number there is of its dtype, or more.
    narrow = q.format.scale_dtype == np.float16
    least = 64 * 2.0**-24 if narrow else 1e-35
    power = 2.0 ** np.ceil(np.log2(least / scale.min()) + case.integer(0, 6))
    small = eqq.quantize(w * np.float32(power), q.format, axis=q.axis).dequantize()
    before = _sqnr(d, w)
    after = _sqnr(np.asarray(small, np.float64) / power, w)
    yield f"times {power:.2g}: {after:.1f} dB, not {before:.1f}", after > before - 2


def _sqnr(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return 10 * np.log10(np.sum(b**2) / max(np.sum((a - b) ** 2), 1e-300))


def _mapped_axes(case, q, d, w):
    # Over any axis: mapped rightly, or refused. Never otherwise.
    if q.ndim < 2 or 0 in q.shape:
        return
    for axis in range(-q.ndim, q.ndim):
        expected = jax.vmap(lambda a: 1.0 * a, axis)(d)
        fn = lambda: jax.vmap(lambda q: q.dequantize(), axis)(q)
        if not _refuses(fn):
            yield f"vmap over axis {axis}", equal(fn(), expected)


def _exported(case, q, d, w):
    # In a program, and as its argument.
    if q.ndim != 2 or q.activation is not None:
        return
    x = jnp.asarray(case.rng.standard_normal((3, q.shape[0])), jnp.float32)
    run = lambda x, q: eqq.qmatmul(x, q, kernel="reference")
    expected = jax.jit(run)(x, q)
    inside = jax.export.export(jax.jit(lambda x: run(x, q)))(x)
    inside = jax.export.deserialize(inside.serialize())
    yield "inside", np.allclose(inside.call(x), expected, 1e-5, 1e-5, equal_nan=True)
    outside = jax.export.export(jax.jit(run))(x, q)
    outside = jax.export.deserialize(outside.serialize())
    found = outside.call(x, q)
    yield "argument", np.allclose(found, expected, 1e-5, 1e-5, equal_nan=True)


_laws = (_layout, _prepacked, _stacked, _indexed, _compared, _saved, _again)
_laws += (_quantized_inside, _not_finite, _finite_or_refused, _of_any_size)
_laws += (_mapped_axes, _exported)
