import os


# Before JAX is imported: sharding is tested on eight devices that one machine plays.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("eqquant", deadline=None, derandomize=True)
hypothesis.settings.load_profile("eqquant")
