from ._file import (
    check_shape as check_shape,
    MappedFile as MappedFile,
    RawTensor as RawTensor,
    short as short,
)
from ._ggml import ggml_numbers as ggml_numbers, ggml_types as ggml_types
from ._gguf import (
    alignment_of as alignment_of,
    array as array,
    gguf_magic as gguf_magic,
    scalars as scalars,
    string as string,
)
from ._json import parse as parse
from ._open import Container as Container, open_container as open_container
from ._safetensors import dtypes as dtypes
from ._shards import (
    index_suffix as index_suffix,
    journal_name as journal_name,
    main_file as main_file,
    read_index as read_index,
)
