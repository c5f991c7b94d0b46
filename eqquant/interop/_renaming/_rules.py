import dataclasses
from typing import TypeAlias

from ...formats import AbstractFormat, as_format
from ._patterns import fields_of


@dataclasses.dataclass(frozen=True, init=False)
class Join:
    """A pattern for [`eqquant.interop.load_into`][] that joins several arrays of a
    checkpoint to one array of the model. Quantized arrays stay packed.

    !!! Example

        ```python
        qkv = Join(*(f"layers.{{i}}.{x}_proj.{{kind}}" for x in "qkv"))
        rename = {qkv: "blocks.{i}.attention.qkv.{kind}"}
        ```

    **Arguments:**

    - `patterns`: the patterns of the arrays, in order.
    - `axis`: the axis to join, counted from the end. By default, it is the axis of the
        outputs: -2 for `(out, in)` matrices, -1 for vectors, and for quantized arrays
        the one that products do not contract.
    - `groups`: the number of equal groups into which the axis of each array is cut
        first, so that the result has the first group of each, then the second of each,
        and so on.
    """

    patterns: tuple[str, ...]
    axis: int | None
    groups: int

    def __init__(self, *patterns: str, axis: int | None = None, groups: int = 1):
        _check(self, patterns, axis, groups)
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "axis", axis)
        object.__setattr__(self, "groups", groups)


@dataclasses.dataclass(frozen=True, init=False)
class Sum:
    """A pattern for [`eqquant.interop.load_into`][] that adds several arrays of a
    checkpoint, such as the two biases of a recurrent PyTorch layer. They must be dense,
    and have the same shape.

    !!! Example

        ```python
        rename = {
            Sum("lstm.bias_ih_l{i}", "lstm.bias_hh_l{i}"): "cells.{i}.bias",
            "lstm.{weight}_l{i}": "cells.{i}.{weight}",
        }
        ```

    **Arguments:**

    - `patterns`: the patterns of the arrays.
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str):
        _check(self, patterns, None, 1)
        object.__setattr__(self, "patterns", patterns)


# A pattern of several arrays that become one.
Several: TypeAlias = Join | Sum


@dataclasses.dataclass(frozen=True, init=False)
class Split:
    """A name for [`eqquant.interop.load_into`][] that splits an array of the checkpoint
    into several arrays of the model. Quantized arrays stay packed.

    !!! Example

        ```python
        gate_up = Split("layers.{i}.gate.weight", "layers.{i}.up.weight")
        rename = {"layers.{i}.gate_up_proj.weight": gate_up}
        ```

    **Arguments:**

    - `names`: the names of the parts, in order.
    - `sizes`: the sizes of the parts. By default, the sizes of the model's arrays, if
        no other rules follow.
    - `axis`: as in [`eqquant.interop.Join`][].
    - `groups`: the number of equal groups into which the axis is cut first. Each group
        is then split, and a part has its share of all groups. With as many groups as
        heads of keys, this splits arrays in which the queries, keys and values of a
        head follow each other.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] | None
    axis: int | None
    groups: int

    def __init__(
        self,
        *names: str,
        sizes: tuple[int, ...] | list[int] | None = None,
        axis: int | None = None,
        groups: int = 1,
    ):
        _check(self, names, axis, groups)
        if sizes is not None and len(sizes) != len(names):
            raise ValueError(
                f"`sizes` should be {len(names)} numbers, one for each name. Got "
                f"{sizes!r}."
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sizes))
        object.__setattr__(self, "axis", axis)
        object.__setattr__(self, "groups", groups)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A name for [`eqquant.interop.load_into`][] of an array of the model whose last
    two axes are swapped in the checkpoint. Quantized arrays stay packed.

    !!! Example

        ```python
        rename = {"h.{i}.mlp.c_fc.weight": Transposed("layers.{i}.up.weight")}
        ```
    """

    name: str


@dataclasses.dataclass(frozen=True, init=False)
class Quantized:
    """A name for [`eqquant.interop.load_into`][] of an array of the model that is
    quantized while it is loaded, one array of the checkpoint at a time. Arrays that
    already have the format are unchanged, bit for bit. Arrays in another format are
    decoded and requantized, which adds to their error.

    This can join or stack arrays of several formats, and load a dense checkpoint with
    at most one dense array in memory.

    !!! Example

        ```python
        # In files of type Q4_K_M, some of these are `Q4_K` and some `Q6_K`.
        qkv = Join(*(f"layers.{{i}}.self_attn.{x}_proj.weight" for x in "qkv"))
        rename = {qkv: Quantized("layers.qkv.weight", "q6_k")}
        ```

    **Arguments:**

    - `name`: the name, a [`eqquant.interop.Transposed`][] or a
        [`eqquant.interop.Split`][].
    - `format`: the format, or its name. Dense matrices are assumed to be `(out, in)` in
        the checkpoint, and are quantized along the last axis. Arrays with more than two
        axes whose last axis is shorter than 16 are assumed to be filters of
        convolutions, and are quantized along all axes but the first.
    """

    name: str | Transposed | Split
    format: AbstractFormat

    def __init__(self, name: str | Transposed | Split, format: AbstractFormat | str):
        if not isinstance(name, str | Transposed | Split):
            raise TypeError(f"`name` should be a name. Got {name!r}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "format", as_format(format))


def _check(rule, names, axis, groups):
    kind = type(rule).__name__
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{kind}` should have two names or more. Got {names!r}.")
    for name in names[1:]:
        same = set(fields_of(name)) == set(fields_of(names[0]))
        if not same or name.count("*") != names[0].count("*"):
            raise ValueError(
                f"The names of `{kind}` should have the same wildcards. Got "
                f"{names[0]!r} and {name!r}."
            )
    if type(groups) is not int or groups < 1:
        raise ValueError(f"`groups` should be 1 or more. Got {groups!r}.")
    if axis is not None and (type(axis) is not int or axis >= 0):
        raise ValueError(
            f"`axis` should be counted from the end, such as -1. Got {axis!r}."
        )
