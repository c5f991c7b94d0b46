"""The product of a dense matrix with a quantized weight, as one JAX primitive
(`_primitive`) with rules for `vmap` and derivatives, and its partitioning over devices
(`_partition`). `_axes` relates the contracted axes of an array to its stored arrays,
and `_specs` relates their shardings, of which `_splits` says which are possible.

This room imports `formats` and `kernels`.
"""

from ._axes import (
    as_integers as as_integers,
    as_tuple as as_tuple,
    Axis as Axis,
    contracted_back as contracted_back,
    contracted_last as contracted_last,
    logical as logical,
    normalise_axis as normalise_axis,
)
from ._in_rows import transposed as transposed
from ._place import place as place, placed as placed, stored_spec as stored_spec
from ._primitive import (
    problem_of as problem_of,
    qmatmul_p as qmatmul_p,
    qmatmul_rows as qmatmul_rows,
)
from ._specs import (
    as_entry as as_entry,
    by_types as by_types,
    codes_of as codes_of,
    declared_by_row as declared_by_row,
    full_spec as full_spec,
    logical_sharding as logical_sharding,
    names_of as names_of,
    number_of_shards as number_of_shards,
    spec_of as spec_of,
    typed_sharding as typed_sharding,
    vary_together as vary_together,
    with_spec as with_spec,
)
from ._splits import checked_by_row as checked_by_row, splits_evenly as splits_evenly
from ._stay import stay as stay
