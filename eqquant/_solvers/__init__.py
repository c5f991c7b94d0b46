"""Methods that round a weight, given the inputs that it is multiplied with.

A method (`_method`) chooses the codes, scales and offsets of a matrix. `_scale_search`,
`_gptq` and `_hqq` are methods, and `_awq` scales channels and then uses another method.
They share the rounding of a block (`_rounding`), the search for the scales of blocks by
squared errors (`_search`), least squares for given codes (`_least_squares`), and
operations on Gram matrices (`_gram`). `solved` quantizes an array by a method, and can
correct it for inputs that have changed. `_squared_errors` measures the error of
products. `_factors` predicts how much of an error GPTQ will leave.

Hot loops store blocks as columns, `s n g`: the numbers at one position of all blocks
are contiguous, and candidates for a block are an axis before `n`.

This room imports `_array` and the rooms below it. A format declares which parameters a
method may choose: see `AbstractAdjustable` in `eqquant.formats`.

To add a method: write a subclass of `AbstractMethod` in a file of its own, and export
it here and in `eqquant`. Code outside the package only writes the subclass.
"""

from ._awq import AWQ as AWQ
from ._factors import (
    inverse_factors as inverse_factors,
    mean_of_factors as mean_of_factors,
)
from ._gptq import GPTQ as GPTQ
from ._hqq import HQQ as HQQ
from ._method import AbstractMethod as AbstractMethod
from ._scale_search import ScaleSearch as ScaleSearch
from ._solved import solved as solved
from ._squared_errors import squared_errors as squared_errors
