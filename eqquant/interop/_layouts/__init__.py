from ._awq import find_awq as find_awq
from ._base import Source as Source
from ._bitnet import find_bitnet as find_bitnet
from ._bitsandbytes import (
    bitsandbytes_config as bitsandbytes_config,
    bitsandbytes_parts as bitsandbytes_parts,
    find_bitsandbytes as find_bitsandbytes,
)
from ._compressed import (
    compressed_config as compressed_config,
    compressed_parts as compressed_parts,
    find_compressed as find_compressed,
)
from ._gguf import find_gguf as find_gguf, gguf_parts as gguf_parts
from ._gptq import (
    find_gptq as find_gptq,
    gptq_config as gptq_config,
    gptq_parts as gptq_parts,
)
from ._mlx import find_mlx as find_mlx, mlx_config as mlx_config, mlx_parts as mlx_parts
from ._mxfp4 import find_mxfp4 as find_mxfp4
from ._torchao import find_torchao as find_torchao
