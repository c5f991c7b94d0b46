import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqquant.kernels import integer_product

from .levels import available


generator = np.random.default_rng(0)


def integers(*shape):
    return generator.integers(-127, 128, shape, dtype=np.int8)


# By XLA or the native library, whichever is taken.
@pytest.mark.parametrize("level", available or (None,))
def test_against_integers(level, monkeypatch):
    if level is not None:
        monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)
        jax.clear_caches()
    x, w, y = integers(3, 5, 70), integers(33, 70), integers(3, 5, 33)
    stacked, more = integers(2, 5, 70), integers(2, 33, 70)
    long = np.full((2, 140_001), 127, np.int8)

    @jax.jit
    def products(x, w, y, stacked, more, long):
        mapped = jax.vmap(integer_product, (0, None))(x, w)
        both = jax.vmap(integer_product)(stacked, more)
        return (
            integer_product(x, w),
            mapped,
            jax.vmap(jax.vmap(integer_product, (0, None)), (1, None))(x, w),
            integer_product(y, w, across=True),
            integer_product(stacked, more, stack=1),
            both,
            integer_product(x[0, 0], w),
            integer_product(long, long),
        )

    found = products(x, w, y, stacked, more, long)
    wide = lambda a: a.astype(np.int64)
    plain = wide(x) @ wide(w).T
    side_by_side = wide(stacked) @ wide(more).mT
    wanted = (
        plain,
        plain,
        plain.swapaxes(0, 1),
        wide(y) @ wide(w),
        side_by_side,
        side_by_side,
        plain[0, 0],
        wide(long) @ wide(long).T,
    )
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-7)


# XLA gives wrong numbers there for other sizes.
@pytest.mark.parametrize("across", (False, True))
def test_gpus_contract_multiples_of_four(across):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.int8) for shape in ((5, 70), (33, 70)))
    if across:
        w = jax.ShapeDtypeStruct((70, 33), jnp.int8)
    traced = jax.jit(lambda x, w: integer_product(x, w, across=across)).trace(x, w)
    (dot,) = re.findall(
        r"dot_general.*", traced.lower(lowering_platforms=("cuda",)).as_text()
    )
    assert "tensor<5x72xi8>" in dot
    assert "xi8" in dot and "70" not in dot


def test_any_shape_and_integer():
    """Of whole and partial groups of rows and columns, cut several times, empty, and
    stacked; with -128, which no format gives."""
    ends = np.array([-128, -127, 127], np.int8)
    shapes = [(1, 1, 1), (2, 3, 5), (34, 1031, 17), (32, 8, 16), (35, 2050, 9)]
    shapes += [(0, 4, 3), (40, 0, 3), (40, 4, 0), (32, 131_080, 2)]

    def operands(m, k, n, stack=()):
        return [generator.choice(ends, (*stack, *s)) for s in ((m, k), (n, k), (k, n))]

    given = [operands(*shape) for shape in shapes]
    stacked = operands(37, 70, 3, stack=(2, 3))

    @jax.jit
    def products(given, stacked):
        both = lambda x, w, v, stack=0: (
            integer_product(x, w, stack=stack),
            integer_product(x, v, stack=stack, across=True),
        )
        return [both(*some) for some in given], both(*stacked, stack=2)

    found, side_by_side = products(given, stacked)
    for (x, w, v), (along, across) in zip(
        [*given, stacked], [*found, side_by_side], strict=True
    ):
        x, w, v = (a.astype(np.int64) for a in (x, w, v))
        for a, w in ((along, w.mT), (across, v)):
            assert a.dtype == np.float32
            if x.shape[-1] < 2**16:
                np.testing.assert_allclose(a, x @ w, rtol=1e-7)
                continue
            # (Parts of long sums are rounded, too.)
            off = np.abs(np.asarray(a, np.float64) - x @ w)
            assert np.all(off <= 5e-7 * (np.abs(x) @ np.abs(w)))
