import jax


# Since JAX 0.11, XLA on a CPU keeps a fusion that reads many parts of an array whole;
# before, it splits it into many. It also multiplies bfloat16 and 8-bit integers as such
# since then, and not as floats.
fuses = jax.__version_info__ >= (0, 11)
