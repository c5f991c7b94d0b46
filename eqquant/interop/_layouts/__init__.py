"""The layouts of libraries, for reading and writing. Each has a file, which ends with
`register_layout` and is imported here."""

from . import (
    _awq as _awq,
    _bitnet as _bitnet,
    _bitsandbytes as _bitsandbytes,
    _compressed as _compressed,
    _exl3 as _exl3,
    _gptq as _gptq,
    _mlx as _mlx,
    _modelopt as _modelopt,
    _mxfp4 as _mxfp4,
    _torchao as _torchao,
)
from ._architectures import check_architecture as check_architecture
from ._base import Source as Source, to_quantized as to_quantized
from ._gguf import gguf_parts as gguf_parts
from ._parts_of_each import NotWritable as NotWritable, parts_of_each as parts_of_each
from ._registry import (
    check_hints as check_hints,
    layouts as layouts,
    parts_of as parts_of,
    register_layout as register_layout,
    writers as writers,
)
from ._rows import Rows as Rows
from ._unread import may_be_part as may_be_part, unread as unread
