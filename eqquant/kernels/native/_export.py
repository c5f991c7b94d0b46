from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from ._library import functions


# Part of the keys of JAX's caches of traces and lowered programs.
_to_equals = jax.make_user_context(False)


def export(
    fn: jax.stages.Wrapped,
    *,
    platforms: Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., jax.export.Exported]:
    """`jax.export.export` for servers that import eqquant: the exported program keeps
    the kernels of the native library for CPUs.

    A program of `jax.export.export` itself may run anywhere, so on a CPU it has the
    kernels that XLA compiles. [`eqquant.explain`][] names both.

    !!! Example

        ```python
        exported = eqquant.export(jax.jit(lambda x, w: x @ w))(x, w)
        text = exported.serialize()

        # On the server:
        import eqquant
        y = jax.export.deserialize(text).call(x, w)
        ```

    **Arguments:**

    - `fn`, `platforms`, `disabled_checks`: as in `jax.export.export`. JAX's check of
        custom calls is disabled for the functions of the native library.

    **Returns:**

    A function of the arguments of `fn`, or of a `jax.ShapeDtypeStruct` for each array,
    that returns a `jax.export.Exported`.

    A server needs this version of eqquant with its native library, and the instruction
    sets of the exporting machine: otherwise the call raises an error. To export for
    servers with fewer instruction sets, set the environment variable
    `EQQUANT_NATIVE_LEVEL` to one that they have, such as `avx2`. Products with symbolic
    sizes use XLA's kernels.
    """
    custom_call = jax.export.DisabledSafetyCheck.custom_call
    checks = [*disabled_checks, *map(custom_call, functions())]

    def exported(*args, **kwargs):
        with _to_equals(True):
            return jax.export.export(fn, platforms=platforms, disabled_checks=checks)(
                *args, **kwargs
            )

    return exported


def is_portable(module: Any) -> bool:
    """Whether the program of a lowering's `module_context` may run where eqquant is not
    installed."""
    return module.lowering_parameters.for_export and not _to_equals.value
