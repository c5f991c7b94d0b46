import jax

from ..formats import AbstractFormat, Int8


# Which product is the fastest, as `eqquant bench` found on two cores with AVX512.

# Before JAX 0.11, XLA breaks a fusion that reads many parts of an array into many.
fuses = jax.__version_info__ >= (0, 11)

# From what size of the weight on products of rounded inputs pay, and from how many rows
# on those of bfloat16.
rounding_size = 2**18
bfloat16_rows = 32


def sweep_rows(format: AbstractFormat) -> int:
    """Up to how many rows a sweep over the bytes of a weight is the fastest."""
    if isinstance(format, Int8):
        return 1 if fuses else 0
    return 2
