import jax


# Since JAX 0.11, XLA on a CPU keeps a fusion that reads many parts of an array whole;
# earlier versions split it into many. It also multiplies bfloat16 and 8-bit integers
# directly, and no longer as floats.
fuses = jax.__version_info__ >= (0, 11)
