from ._bitsandbytes import (
    bitsandbytes_config as bitsandbytes_config,
    bitsandbytes_parts as bitsandbytes_parts,
)
from ._compressed import (
    compressed_config as compressed_config,
    compressed_parts as compressed_parts,
)
from ._files import (
    gguf_layout as gguf_layout,
    Layout as Layout,
    safetensors_layout as safetensors_layout,
    TensorFile as TensorFile,
)
from ._gguf import gguf_parts as gguf_parts
from ._gptq import gptq_config as gptq_config, gptq_parts as gptq_parts
from ._mlx import mlx_config as mlx_config, mlx_parts as mlx_parts
from ._part import Part as Part
