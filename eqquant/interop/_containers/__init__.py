from ._cursor import Cursor as Cursor
from ._file import (
    check_shape as check_shape,
    MappedFile as MappedFile,
    RawTensor as RawTensor,
    short as short,
)
from ._gguf import gguf_layout as gguf_layout, gguf_magic as gguf_magic
from ._json import (
    check_bounds as check_bounds,
    parse as parse,
    read_bytes as read_bytes,
    read_json as read_json,
)
from ._open import Container as Container, open_container as open_container
from ._safetensors import safetensors_layout as safetensors_layout
from ._shards import (
    index_suffix as index_suffix,
    journal_name as journal_name,
    main_file as main_file,
    read_index as read_index,
    set_aside_path as set_aside_path,
)
from ._tensor_file import (
    FileLayout as FileLayout,
    Part as Part,
    TensorFile as TensorFile,
)
from ._types import (
    dtypes as dtypes,
    ggml_numbers as ggml_numbers,
    ggml_types as ggml_types,
)
