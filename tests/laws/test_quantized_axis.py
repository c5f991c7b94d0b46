"""Whichever axis is quantized, what is stored is the same to the last bit, and XLA does
the same: it moves the axis in memory once, and does not read across the rows."""

import re

import jax
import jax.export
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import formats, normal, trees_equal


some = ("nf4", "int8", "int8-32", "int4-affine", "ternary-threshold", "binary", "q4_0")


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", [*some, "fp8", "mxfp4", "nvfp4", "q4_1"])
def test_same_bits(name):
    w = normal(3, 130, 288)
    last = eqq.quantize(w, formats[name], axis=-1)
    assert trees_equal(
        last.stored, eqq.quantize(w.swapaxes(1, 2), formats[name], axis=-2).stored
    )
    first = eqq.quantize(np.moveaxis(w, 2, 0), formats[name], axis=0)
    assert trees_equal(last.stored, first.stored)


@pytest.mark.examples(2)
@pytest.mark.optimized
@pytest.mark.parametrize("name", some)
@pytest.mark.parametrize("fn", [eqq.quantize, eqq.straight_through])
def test_moved_once(name, fn):
    if fn is eqq.straight_through and name != "int8-32":
        pytest.skip("the same rows")
    w = normal(256, 384)
    compiled = jax.jit(lambda w: fn(w, formats[name], axis=-2)).lower(w).compile()
    text = compiled.as_text()
    found = dict(re.findall(r"%(\S+) = \w+(\[[\d,]*\]\{[\d,]*)[:}]", text))
    read = [
        found[operand]
        for operands in re.findall(r" reduce\(([^)]*)\)", text)
        for operand in re.findall(r"%([\w.\-]+)", operands)
        if operand in found
    ]
    read = [a for a in read if np.prod(_sizes(a), dtype=int) >= w.size // 32]
    assert len(read) > 0 and all(_lies_in_rows(a) for a in read)


def _sizes(a):
    return [int(size) for size in re.findall(r"\d+", a[: a.index("]")])]


def _lies_in_rows(a):
    # Axes of one number do not count.
    order = [int(axis) for axis in re.findall(r"\d+", a[a.index("{") :])]
    order = [axis for axis in order if _sizes(a)[axis] > 1]
    return order == sorted(order, reverse=True)


def test_transformed_and_exported():
    w = normal(3, 64, 32)
    quantized = lambda w: eqq.quantize(w, "nf4").dequantize()
    expected = np.asarray(quantized(w))
    last = jax.vmap(quantized, in_axes=2)(np.moveaxis(w, 0, 2))
    np.testing.assert_array_equal(last, expected)
    exported = jax.export.export(jax.jit(quantized))(w)
    np.testing.assert_array_equal(exported.call(w), expected)
    gradient = jax.vmap(jax.grad(lambda w: eqq.straight_through(w, "nf4").sum()))(w)
    np.testing.assert_array_equal(gradient, np.ones_like(w))


# What takes much memory is slow as well: large buffers are new to each call.
@pytest.mark.examples(3)
@pytest.mark.optimized
@pytest.mark.parametrize("name", ("nf4", "int8-32", "fp8"))
@pytest.mark.parametrize("axis, copies", ((-1, 0.4), (-2, 1.4)))
def test_temporaries(name, axis, copies):
    w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    lowered = jax.jit(lambda w: eqq.quantize(w, formats[name], axis=axis)).lower(w)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < copies * w.size * 4
