import numpy as np
import pytest

import eqquant as eqq

from ..helpers import formats, native_formats
from .reference import round_trip


def samples(distribution):
    rng = np.random.default_rng(0)
    if distribution == "normal":
        return rng.standard_normal((256, 4096)).astype(np.float32)
    return rng.standard_t(5, (256, 4096)).astype(np.float32)


def sqnr(w, decoded):
    """The signal-to-quantization-noise ratio, in dB."""
    w, decoded = np.asarray(w, np.float64), np.asarray(decoded, np.float64)
    return 10 * np.log10(np.sum(w**2) / np.sum((decoded - w) ** 2))


@pytest.mark.examples(1)
@native_formats
@pytest.mark.parametrize("distribution", ("normal", "student-t"))
def test_as_the_reference(format, distribution):
    w = samples(distribution)
    ours = sqnr(w, eqq.quantize(w, format, axis=-1).dequantize())
    assert abs(ours - sqnr(w, round_trip(w, format))) < 0.1


# Of a million numbers of a normal distribution, in rows of 4096.
expected = {
    "nf4": 20.74,
    "nf4-bfloat16-scales": 21.18,
    "int8": 41.25,
    "int8-32": 45.45,
    "int4": 19.38,
    "int4-affine": 20.82,
    "ternary": 5.80,
    "ternary-tensor": 5.80,
    "ternary-threshold": 7.24,
    "binary": 4.40,
    "binary-128": 4.43,
}


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", expected)
def test_as_known(name):
    w = samples("normal")
    ours = sqnr(w, eqq.quantize(w, formats[name], axis=-1).dequantize())
    assert abs(ours - expected[name]) < 0.1


def test_double_quantization_costs_nothing():
    w = samples("normal")
    q = eqq.quantize(w, eqq.Nested(eqq.NF4(64), scale=eqq.Int8(256)), axis=-1)
    assert abs(sqnr(w, q.dequantize()) - 20.74) < 0.1
    assert q.bits_per_weight < 4.15
