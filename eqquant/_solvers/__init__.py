"""How the numbers of a weight are rounded, given what the weight is multiplied with.

A method (`_method`) chooses the codes, scales and offsets of a matrix. `_scale_search`,
`_gptq` and `_hqq` are methods, and `_awq` is one that scales channels before. They
share how a block is rounded (`_rounding`), the search for the scales of blocks by
squared errors (`_search`), least squares for given codes (`_least_squares`), and the
Gram matrix as they need it (`_gram`). `solved` quantizes an array by a method,
`_target` finds what is to be rounded if the inputs have changed, and `_squared_errors`
measures what products lose. `_factors` tells
before what GPTQ will leave of an error.

Where XLA is to be fast, arrays are columns, `s n g`: the numbers at one place of all
blocks are next to each other, and what is tried for a block is an axis before `n`.

This room imports `_array` and the rooms below it. Formats say themselves what of theirs
may be chosen: see `AbstractAdjustable` in `eqquant.formats`.

To add a method: write a subclass of `AbstractMethod` in a file of its own, and export
it here and in `eqquant`. Code outside the package only writes the subclass.
"""

from ._awq import AWQ as AWQ
from ._factors import mean_of_factors as mean_of_factors
from ._gptq import GPTQ as GPTQ
from ._hqq import HQQ as HQQ
from ._method import AbstractMethod as AbstractMethod
from ._scale_search import ScaleSearch as ScaleSearch
from ._solved import solved as solved
from ._squared_errors import squared_errors as squared_errors
