"""Attacks the library at random: `python -m tests.attack --seconds 60`.

Formats, shapes, layouts, transformations, inputs, weights and kernels are drawn, and
what the library makes of them is held against NumPy in float64 with the dequantized
weight, within the bound that the kernel declares. Each case has a number, and draws
from a generator of its own: `--seed S --case N` repeats one.

With `EQQUANT_TESTS=cuda` in the environment, a GPU is attacked. (Some cases compare
with what XLA multiplies: these need `JAX_DEFAULT_MATMUL_PRECISION=highest`.)
"""
