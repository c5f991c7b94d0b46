from ._awq import find_awq as find_awq
from ._base import resized as resized, Source as Source
from ._bitnet import find_bitnet as find_bitnet
from ._bitsandbytes import find_bitsandbytes as find_bitsandbytes
from ._compressed import find_compressed as find_compressed
from ._eqquant import checked_skeleton as checked_skeleton, find_eqquant as find_eqquant
from ._float8 import find_float8 as find_float8
from ._gguf import (
    block_formats as block_formats,
    find_gguf as find_gguf,
    halves_first as halves_first,
    heads_of as heads_of,
)
from ._gptq import find_gptq as find_gptq
from ._mlx import find_mlx as find_mlx
from ._mxfp4 import find_mxfp4 as find_mxfp4
from ._torchao import find_torchao as find_torchao
