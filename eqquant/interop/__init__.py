"""Files: `save` and `load`, and reading and writing other libraries' checkpoints.

May import `_tree` and the rooms below it. `_containers` reads and writes safetensors
and GGUF files; `_layouts` has the layouts of libraries in these files, and `_own` the
files of `save`. `_llama_cpp` describes a model for llama.cpp. `_renaming` has the rules
by which arrays are renamed, joined, split and stacked. `_converting` converts files to
files.

To add a library's layout, write one file in `_layouts`, with a function that finds the
library's arrays among the tensors of a file, and one that returns the tensors of an
array. End it with `register_layout`, and import it in `_layouts/__init__.py`. Code
outside the package calls [`eqquant.interop.register_layout`][] itself. To add an
architecture of llama.cpp, add its hyperparameters and its line of the table in
`_llama_cpp`.
"""

from ._checkpoint import Checkpoint as Checkpoint, Entry as Entry
from ._containers import Part as Part
from ._converting import convert as convert, Outcome as Outcome
from ._imatrix import read_imatrix as read_imatrix, write_imatrix as write_imatrix
from ._layouts import (
    register_layout as register_layout,
    Rows as Rows,
    Source as Source,
    to_quantized as to_quantized,
)
from ._load_into import load_into as load_into
from ._open import (
    open as open,
    read_awq as read_awq,
    read_bitnet as read_bitnet,
    read_bitsandbytes as read_bitsandbytes,
    read_compressed_tensors as read_compressed_tensors,
    read_exl3 as read_exl3,
    read_gguf as read_gguf,
    read_gptq as read_gptq,
    read_mlx as read_mlx,
    read_mxfp4 as read_mxfp4,
)
from ._own import load as load, load_struct as load_struct, save as save
from ._renaming import (
    Join as Join,
    Quantized as Quantized,
    renamed as renamed,
    Split as Split,
    Sum as Sum,
    Transposed as Transposed,
)
from ._tokenizer import tokenizer as tokenizer
from ._write_to import (
    write as write,
    write_bitsandbytes as write_bitsandbytes,
    write_compressed_tensors as write_compressed_tensors,
    write_exl3 as write_exl3,
    write_gguf as write_gguf,
    write_gptq as write_gptq,
    write_mlx as write_mlx,
)
