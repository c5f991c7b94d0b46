"""The block formats of GGUF, bit for bit as ggml stores them."""

from ._base import (
    AbstractGGUF as AbstractGGUF,
    AbstractGGUFBlocks as AbstractGGUFBlocks,
)
from ._q2_k import Q2_K as Q2_K
from ._q3_k import Q3_K as Q3_K
from ._q4_0 import Q4_0 as Q4_0
from ._q4_1 import Q4_1 as Q4_1
from ._q4_k import Q4_K as Q4_K
from ._q5_0 import Q5_0 as Q5_0
from ._q5_1 import Q5_1 as Q5_1
from ._q5_k import Q5_K as Q5_K
from ._q6_k import Q6_K as Q6_K
from ._q8_0 import Q8_0 as Q8_0
from ._tq1_0 import TQ1_0 as TQ1_0
from ._tq2_0 import TQ2_0 as TQ2_0
