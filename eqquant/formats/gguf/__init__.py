"""The types of quantized tensors in GGUF files. Decoding gives the numbers of ggml, bit
for bit. So does encoding, except in the types for which ggml searches for scales,
`Q2_K` to `Q6_K`, `IQ4_NL` and `IQ4_XS`: their sums are computed in another order.

`Q1_0`, `Q2_0`, `Q4_0`, `Q8_0`, `IQ4_NL`, `TQ1_0` and `TQ2_0` are grids, whose codes and
scales are stored apart. The others are stored as the bytes of the file, and are
composites: `flat` returns the codes, scales and minima of the blocks. `from_blocks` and
`to_blocks` convert from and to the bytes of a file.

The types `IQ1_S` to `IQ3_S` have a codebook of points of four or eight dimensions
(`_codebook`), and can only be decoded.

Each type defines the places of its bits in a block as its `fields`, which `_fields`
reads and writes, and from which kernels are made. See `notebooks/contributing.md` for
how to add a type. An `AbstractK` also needs `search`; the native encoder uses both.
"""

from ._base import (
    AbstractGGUF as AbstractGGUF,
    AbstractGGUFBlocks as AbstractGGUFBlocks,
    AbstractGGUFBytes as AbstractGGUFBytes,
)
from ._codebook import AbstractCodebook as AbstractCodebook
from ._iq import (
    IQ1_M as IQ1_M,
    IQ1_S as IQ1_S,
    IQ2_S as IQ2_S,
    IQ2_XS as IQ2_XS,
    IQ2_XXS as IQ2_XXS,
    IQ3_S as IQ3_S,
    IQ3_XXS as IQ3_XXS,
)
from ._iq4 import IQ4_NL as IQ4_NL, IQ4_XS as IQ4_XS
from ._k import AbstractK as AbstractK
from ._legacy import (
    Q4_0 as Q4_0,
    Q4_1 as Q4_1,
    Q5_0 as Q5_0,
    Q5_1 as Q5_1,
    Q8_0 as Q8_0,
)
from ._planes import Q1_0 as Q1_0, Q2_0 as Q2_0
from ._q_k import (
    Q2_K as Q2_K,
    Q3_K as Q3_K,
    Q4_K as Q4_K,
    Q5_K as Q5_K,
    Q6_K as Q6_K,
)
from ._search import (
    IntegerSearch as IntegerSearch,
    PointSearch as PointSearch,
    RangeSearch as RangeSearch,
)
from ._tq import TQ1_0 as TQ1_0, TQ2_0 as TQ2_0
