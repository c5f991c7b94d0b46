"""The speed and the memory of whole models that generate text, beside llama.cpp.

`_generation` writes the models (`_file`) and runs each in a process of its own:
`_child`, or `_llama_cpp`.
"""

from ._generation import (
    Generation as Generation,
    measure_generation as measure_generation,
    run_generation as run_generation,
)
