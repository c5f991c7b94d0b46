import dataclasses
import inspect
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._array import has_numbers, is_quantized
from ._text import plain, short_array, short_bytes
from ._uses import closed_over, Use, uses


@dataclasses.dataclass(frozen=True)
class Operand:
    """A quantized array among the operands of a program.

    - `path`: its path, such as `"layers.0.weight"` in the function, if that is a module
        or a transformation of one, and `"args.0.weight"` in its arguments.
    - `shape`, `dtype`, `format`, `nbytes`: the attributes of the array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """How a program uses quantized arrays. It prints as a table.

    - `operands`: the quantized arrays among its operands.
    - `uses`: how the program uses each of them, in order.
    - `temporary_bytes`: the memory that the compiled program allocates while it runs,
        besides its operands and results. `None` if XLA does not report it.
    - `product_dtypes`: the dtypes of the products in the compiled program, and the
        number of each.
    """

    operands: list[Operand]
    uses: list[Use]
    temporary_bytes: int | None
    product_dtypes: dict[str, int]

    @property
    def dequantized(self) -> list[Use]:
        """The uses that make a dense array."""
        return [use for use in self.uses if use.kind == "dequantize"]

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, title_justify="left")
        for name in ("operand", "use", "bytes", "at"):
            table.add_column(name, justify="right" if name == "bytes" else "left")
        for operand in self.operands:
            array = short_array(operand.shape, operand.dtype)
            what = Text(f"{array} in {operand.format}", style="dim")
            nbytes = Text(short_bytes(operand.nbytes), style="dim")
            table.add_row(Text(operand.path, style="bold"), what, nbytes, "")
            mine = [use for use in self.uses if operand.path in use.paths]
            self._add(table, mine)
            if not mine:
                table.add_row("", "is not used", "", "")
        others = [use for use in self.uses if closed_over in use.paths]
        if others:
            table.add_row(Text(closed_over, style="bold"), "", "", "")
            self._add(table, others)
        yield table
        if self.temporary_bytes is not None:
            yield Text(f"\nTemporaries: {short_bytes(self.temporary_bytes)}.")
        products = [f"{n} of {dtypes}" for dtypes, n in self.product_dtypes.items()]
        yield Text(f"Products by XLA: {', '.join(products) or 'none'}.")

    def _add(self, table, uses):
        from rich.text import Text

        for use in uses:
            style = "red" if use.kind == "dequantize" else ""
            nbytes = short_bytes(use.nbytes) if use.nbytes else ""
            table.add_row("", Text(_sentence(use), style), nbytes, _place(use))


def audit(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Audit:
    """Shows how a program uses each quantized array: which kernel computes its
    products, and where it is dequantized. `fn` is traced and compiled, as in
    `eqx.filter_jit`, but not run.

    !!! Example

        ```python
        print(eqquant.audit(jax.vmap(model), x))
        ```

    **Arguments:**

    - `fn`: a function or a module, which may be transformed by
        [`eqquant.implicit`][], `jax.grad` and the like.
    - `args`, `kwargs`: its arguments, with arrays or `jax.ShapeDtypeStruct`s.

    **Returns:**

    An `Audit`, which prints as a table. Its fields hold the same as data. Arrays that
    `fn` closes over have no path, and are listed as `"closed over"`.
    """
    given = {"fn": fn, "args": args, "kwargs": kwargs}
    dynamic, static = eqx.partition(given, _is_array)

    def call(dynamic):
        given = eqx.combine(dynamic, static)
        out = given["fn"](*given["args"], **given["kwargs"])
        return eqx.filter(out, eqx.is_array)

    traced = jax.jit(call).trace(dynamic)
    operands = [*_of_function(fn), *_quantized({"args": args, "kwargs": kwargs})]
    # The same array may be in several places.
    paths = {}
    for path, q in operands:
        for a in jtu.tree_leaves(q):
            paths[id(a)] = paths.get(id(a), frozenset()) | {path}
    labels = [paths.get(id(a), frozenset()) for a in jtu.tree_leaves(dynamic)]
    found = uses(traced.jaxpr, labels, paths)
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    return Audit(
        operands=[_operand(path, q) for path, q in dict(operands).items()],
        uses=found,
        temporary_bytes=None if memory is None else int(memory.temp_size_in_bytes),
        product_dtypes=product_dtypes(compiled.as_text() or ""),
    )


def _of_function(fn):
    # Lists the arrays in a function: for `jax.vmap(model)`, the arrays of the model.
    # `eqx.filter_vmap(model)` has the model both wrapped and as a field, so its arrays
    # would be listed twice.
    inside = _quantized({"fn": inspect.unwrap(fn)})
    known = {id(a) for _, q in inside for a in jtu.tree_leaves(q)}
    return inside + [
        (path, q)
        for path, q in _quantized({"fn": fn})
        if not all(id(a) in known for a in jtu.tree_leaves(q))
    ]


def _quantized(tree):
    found, _ = jtu.tree_flatten_with_path(tree, is_leaf=is_quantized)
    return [(_path(key), q) for key, q in found if is_quantized(q) and has_numbers(q)]


def _path(key):
    first, *rest = key
    text = jtu.keystr(tuple(rest), simple=True, separator=".")
    if first.key == "fn":
        return text or "fn"
    return f"{first.key}.{text}"


def _operand(path, q):
    return Operand(path, q.shape, q.dtype.name, str(q.format), q.nbytes)


def _is_array(x):
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _sentence(use):
    times = f", {use.times} times" if use.times > 1 else ""
    if use.kind == "product":
        rows = "" if use.problem is None else f" of {_rows(use.problem)}"
        return f"product{rows} by `{use.how}`{times}"
    if use.kind == "rows":
        return f"some rows are decoded{times}"
    reason = f" for `{use.how}`" if use.how else ""
    return f"dequantized{reason}{times}"


def _rows(problem):
    if problem.rows is None:
        return "any number of rows"
    return "1 row" if problem.rows == 1 else f"{problem.rows} rows"


def _place(use):
    return pathlib.Path(use.source).name


_typed = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ([a-z]\w*)\[")
_product = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = ([a-z]\w*)\[\S* (dot|convolution|ragged-dot)\((.*?)\)"
)
_operand_name = re.compile(r"%?([\w.\-]+)\s*(?:,|$)")


def product_dtypes(text: str) -> dict[str, int]:
    """Counts the products in the text of a compiled program by their dtypes, such as
    `"s8 x s8 -> s32"`. Products inside kernels are not counted."""
    lines = text.splitlines()
    dtypes: dict[str, str] = {}
    for match in filter(None, map(_typed.match, lines)):
        dtypes[match[1]] = match[2]
    found = Counter()
    for match in filter(None, map(_product.match, lines)):
        names = [name for name in _operand_name.findall(match[3]) if name in dtypes]
        found[f"{' x '.join(dtypes[name] for name in names)} -> {match[1]}"] += 1
    return dict(found)
