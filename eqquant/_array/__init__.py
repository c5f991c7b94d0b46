"""`QuantizedArray`, which takes the place of an array (`_array`), and its base class
with the members of an array (`_array_like`). It is made in `_quantize`, indexed in
`_index`, reshaped along leading axes in `_leading`, and repacked for the kernels of a
platform in `_prepack`. `_stored` raises errors for mapped axes that are not leading
axes, `_held` makes functions fields of modules, `_provenance` traces and warns of
implicit dequantization, and `_exported` registers the class with `jax.export`.

This room imports `_product` and the rooms below it.
"""

from . import _exported as _exported
from ._array import (
    as_dense as as_dense,
    dequantize as dequantize,
    dequantize_for as dequantize_for,
    has_numbers as has_numbers,
    is_quantized as is_quantized,
    QuantizedArray as QuantizedArray,
)
from ._array_like import AbstractArrayLike as AbstractArrayLike, dense_for as dense_for
from ._held import held as held
from ._json import (
    spec_from_json as spec_from_json,
    spec_to_json as spec_to_json,
    tuple_from_json as tuple_from_json,
)
from ._leading import (
    along as along,
    axis_from_end as axis_from_end,
    blocked_axes as blocked_axes,
    broadcast_leading as broadcast_leading,
    is_apart as is_apart,
    leading_axes as leading_axes,
    permuted as permuted,
    reshaped_leading as reshaped_leading,
    take_along as take_along,
    undeclared as undeclared,
)
from ._matmul import left_matmul as left_matmul, matmul as matmul
from ._number import check_number as check_number
from ._once import identity as identity, once_per_array as once_per_array
from ._prepack import relaid as relaid, tree_prepack as tree_prepack
from ._provenance import (
    marked as marked,
    muted as muted,
    name_of as name_of,
    policy as policy,
    source_of as source_of,
    warn_dequantized as warn_dequantized,
)
from ._quantize import (
    check_activation as check_activation,
    quantize as quantize,
    quantized as quantized,
)
from ._sqnr import (
    sqnr as sqnr,
    squares_of_rows as squares_of_rows,
    SquareSums as SquareSums,
    total as total,
    unit_of as unit_of,
)
from ._stored import as_mapped as as_mapped, side_by_side as side_by_side
