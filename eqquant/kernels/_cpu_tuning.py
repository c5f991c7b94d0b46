import jax

from ..formats import AbstractFormat, Int8


# Which product is the fastest: as timed with the clock of `eqquant bench`, on two cores
# with AVX512, of weights of 4096x11008, 4096x4096 and 768x3072.

# Before JAX 0.11, XLA breaks a fusion that reads many parts of an array into many.
fuses = jax.__version_info__ >= (0, 11)

# From what size of the weight on products of rounded inputs pay, and from how many rows
# on those of bfloat16.
rounding_size = 2**18
bfloat16_rows = 32

# Before JAX 0.11, XLA computes products of bfloat16 in float32 on a CPU.
multiplies_bfloat16 = jax.__version_info__ >= (0, 11)


def sweep_rows(format: AbstractFormat) -> int:
    """Up to how many rows a sweep over the bytes of a weight is the fastest."""
    return 0 if isinstance(format, Int8) and not fuses else 2
