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
    """Returns a function that launches a kernel on its operands. The kernel receives
    the addresses of the operands and of the result.

    **Arguments:**

    - `ptx`: the program.
    - `name`: the name of the kernel in the program.
    - `result`: the shape and dtype of the result.
    - `grid`: the number of blocks along each of three axes.
    - `block`: the number of threads in each block.
    """
    fields = [
        f'name = "{name}"',
        'kernel_type = "ptx"',
        f'kernel_data = "{_quoted(ptx)}"',
        *(f"grid_{axis} = {size} : i32" for axis, size in zip("xyz", grid)),
        *(f"block_{axis} = {size} : i32" for axis, size in zip("xyz", (block, 1, 1))),
        # (Shared memory that the kernel declares comes in addition.)
        "shared_mem_bytes = 0 : i32",
    ]
    return jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        result,
        custom_call_api_version=2,
        legacy_backend_config="{" + ", ".join(fields) + "}",
    )


def _quoted(text):
    # Escapes a string as MLIR does.
    for character in '\\"\n\t\r':
        text = text.replace(character, f"\\{ord(character):02X}")
    return text
