"""The files of `eqquant.save`: a safetensors file with a header that describes the
tree (see `_header`). `convert` writes the same files."""

from . import _find as _find
from ._header import is_own as is_own, to_part as to_part
from ._like import named_sharding as named_sharding
from ._load import load as load, load_struct as load_struct
from ._metadata import (
    all_metadata as all_metadata,
    gguf_metadata as gguf_metadata,
    metadata_file as metadata_file,
    metadata_name as metadata_name,
    naming as naming,
)
from ._save import described as described, save as save
