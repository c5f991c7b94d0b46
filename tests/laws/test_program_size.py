import jax
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import all_formats


def size(format, rows):
    """How many operations XLA is given to compile a product."""
    w = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    x = jax.ShapeDtypeStruct((rows, 1024), np.float32)
    q = jax.eval_shape(lambda w: eqq.quantize(w, format), w)
    text = jax.jit(eqq.qmatmul).lower(x, q).as_text()
    return eqq.explain(x, q).kernel, text.count("\n")


# How long XLA takes to compile goes with that. (Those of NF4 have some 300.) Kernels
# for units of bytes have an expression for each of 32 codes of a unit in a sweep, and
# for up to 256 in a tile. Those of 8-bit integers decode outliers apart, in two ways.
limits = {"unit_sweep": 1_200, "unit_tiles": 1_500, "integer_tiles": 900}
# Each code has a scale of its own; or is decoded by a polynomial.
most = 1_600


@pytest.mark.examples(3)
@all_formats
@pytest.mark.parametrize("rows", (1, 16))
def test_products_are_small(format, rows, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    kernel, found = size(format, rows)
    ordered = getattr(format, "ordered", False)
    long = ordered or isinstance(format, eqq.formats.IQ4_XS)
    assert found < (most if long else limits.get(kernel, 700))
