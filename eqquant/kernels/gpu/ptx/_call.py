from collections.abc import Callable, Sequence
from typing import Any

import jax


def call(
    ptx: str,
    name: str,
    result: jax.ShapeDtypeStruct,
    *,
    grid: Sequence[int],
    block: int,
) -> Callable[..., Any]:
    """Calls a kernel, which is given the addresses of the operands and of the result.

    **Arguments:**

    - `ptx`: a program.
    - `name`: that of its kernel.
    - `grid`, `block`: the number of blocks along each of three axes, and of threads in
        each block.
    """
    fields = [
        f'name = "{name}"',
        'kernel_type = "ptx"',
        f'kernel_data = "{_quoted(ptx)}"',
        *(f"grid_{axis} = {size} : i32" for axis, size in zip("xyz", grid)),
        *(f"block_{axis} = {size} : i32" for axis, size in zip("xyz", (block, 1, 1))),
        # (What the kernel declares comes in addition.)
        "shared_mem_bytes = 0 : i32",
    ]
    return jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        result,
        custom_call_api_version=2,
        legacy_backend_config="{" + ", ".join(fields) + "}",
    )


def _quoted(text):
    # As MLIR escapes a string.
    for character in '\\"\n\t\r':
        text = text.replace(character, f"\\{ord(character):02X}")
    return text
