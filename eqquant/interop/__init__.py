"""Files: `save` and `load`, and reading and writing other libraries' checkpoints.

This room imports `_tree` and the rooms below it.

To add a library's checkpoints: write one file in `_layouts`, with a `find_*` function
that finds the library's arrays among a file's tensors, and a `*_parts` function that
gives the tensors that an array is written as; register them in `_open` and `_write_to`.
Code outside of the package builds a mapping of names to `Checkpoint` entries, which
`load_into` and the writers take.
"""

from . import _exported as _exported, _pickled as _pickled
from ._checkpoint import Checkpoint as Checkpoint, Entry as Entry
from ._converting import convert as convert, Outcome as Outcome
from ._load_into import load_into as load_into
from ._open import (
    open as open,
    read_awq as read_awq,
    read_bitnet as read_bitnet,
    read_bitsandbytes as read_bitsandbytes,
    read_compressed_tensors as read_compressed_tensors,
    read_gguf as read_gguf,
    read_gptq as read_gptq,
    read_mlx as read_mlx,
    read_mxfp4 as read_mxfp4,
)
from ._own import load as load, load_struct as load_struct, save as save
from ._rename import renamed as renamed
from ._write_to import (
    write_bitsandbytes as write_bitsandbytes,
    write_compressed_tensors as write_compressed_tensors,
    write_gguf as write_gguf,
    write_gptq as write_gptq,
    write_mlx as write_mlx,
)
