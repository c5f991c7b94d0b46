import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._product import Axis
from .._tree import printable
from ._text import Aligned, short_array, short_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """An array in an [`eqquant.report`][].

    - `path`: its path, such as `"layers.0.weight"`, as in [`eqquant.Rules`][].
    - `shape`, `dtype`: the shape and the dtype of the array before it was quantized.
    - `format`, `activation`, `axis`: how it is quantized. `None` if it is not.
    - `bits_per_weight`: its bits per weight, scales included.
    - `before`, `after`: its size in bytes as a dense array, and as it is. An array in
        several places counts only in the first of them.
    - `sqnr`: the signal-to-quantization-noise ratio in decibels, infinite for an array
        that is unchanged. `None` for arrays of integers, and if `dense` was not given.
    - `reason`, `hint`: why the array is dense, and what would change that.
    - `tied_to`: the first path of the same array, if it occurs earlier in the model.
    - `sharding`: how a quantized array is split over devices. `None` if it is not.
    - `declared`: the declared sharding, if it differs from `sharding`.
    - `padding`: how many unused numbers are stored at the end of each row, because the
        format stores whole blocks.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    activation: str | None
    axis: Axis | None
    bits_per_weight: float
    before: int
    after: int
    sqnr: float | None
    reason: str
    hint: str
    tied_to: str | None
    sharding: str | None = None
    declared: str | None = None
    padding: int = 0


@dataclasses.dataclass(frozen=True)
class Total:
    """The totals of an [`eqquant.report`][]. Each array counts once.

    - `arrays`, `quantized`: the number of arrays, and of quantized arrays.
    - `size`: their number of elements.
    - `before`, `after`: their size in bytes as dense arrays, and as they are.
    """

    arrays: int
    quantized: int
    size: int
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """How many times smaller the model is."""
        return self.before / max(1, self.after)

    @property
    def bits_per_weight(self) -> float:
        """The average over all arrays, including dense ones."""
        return 8 * self.after / max(1, self.size)


# Up to this many similar arrays, or arrays that are dense for the same reason, are
# printed one by one.
_few = 8


def print_report(rows: list[Row], total: Total, width: int) -> Iterator[Any]:
    """Prints the quantized arrays, the dense arrays with the reasons, and the total."""
    from rich.text import Text

    quantized = [row for row in rows if row.format is not None]
    dense = [row for row in rows if row.format is None]
    if quantized:
        yield from _print_quantized(quantized, width)
        yield Text()
    if dense:
        yield from _print_dense(dense, width)
        yield Text()
    arrays = "1 array" if total.arrays == 1 else f"{total.arrays} arrays"
    text = f"{arrays}, {total.quantized} quantized: "
    text += f"{short_bytes(total.before)} → {short_bytes(total.after)}"
    if total.before > 0 and total.after > 0:
        smaller = total.ratio >= 1
        ratio = total.ratio if smaller else 1 / total.ratio
        text += f", {ratio:.3g}x {'smaller' if smaller else 'larger'}"
        text += f", {total.bits_per_weight:.3g} bits/weight"
    yield Text(text, "bold")


def _print_quantized(rows: list[Row], width: int) -> Iterator[Any]:
    from rich.text import Text

    columns = ["Quantized", "array", "format", "axis", "bits", "before", "after"]
    if any(row.activation is not None for row in rows):
        columns.insert(3, "activation")
    if any(row.sqnr is not None for row in rows):
        columns.append("SQNR")
    lines = [_quantized_cells(group, columns[1:]) for group in _merged(rows)]
    left = ("Quantized", "array", "format", "activation")
    alignment = "".join("l" if column in left else "r" for column in columns)
    layout = Aligned([tuple(columns), *lines], alignment, width)
    yield Text(layout.write(tuple(columns)), "bold")
    yield Text("─" * layout.width, "dim")
    for line in lines:
        yield Text(layout.write(line))
    for group in _merged([row for row in rows if row.declared is not None]):
        first = group[0]
        placed = "not split" if first.sharding is None else f"split as {first.sharding}"
        text = f"{_name(group)} is {placed}, but was declared {first.declared}"
        yield Text(f"{printable(text)} → with_sharding", "yellow")
    padded = [row for row in rows if 8 * row.padding > _contracted(row)]
    kind = lambda row: (row.format, _contracted(row), row.padding)
    for (format, k, padding), group in _grouped(padded, kind).items():
        text = f"{format} has whole blocks, {k + padding} numbers for each {k}, in "
        text += _pattern([row.path for row in group])
        yield Text(f"{text} → {_without_padding(group[0])}", "yellow")


def _contracted(row: Row) -> int:
    axes = row.axis if isinstance(row.axis, tuple) else (row.axis or 0,)
    return math.prod(row.shape[axis] for axis in axes)


def _without_padding(row: Row) -> str:
    k = _contracted(row)
    bits = int(row.bits_per_weight * k / (k + row.padding))
    block = next((size for size in (64, 32, 16) if k % size == 0), 16)
    return f"Int({bits}, {block})" if bits > 1 else f"Ternary({block})"


def _print_dense(rows: list[Row], width: int) -> Iterator[Any]:
    from rich.padding import Padding
    from rich.text import Text

    reasons = [
        (reason, hint, [_dense_cells(group) for group in _merged_dense(rows)])
        for reason, hint, rows in _reasons(rows)
    ]
    lines = [line for _, _, lines in reasons for line in lines]
    layout = Aligned(lines, "llrr", width - 4)
    yield Text("Left dense", "bold")
    yield Text("─" * (layout.width + 4), "dim")
    for reason, hint, lines in reasons:
        if reason:
            heading = Text(f"{reason} → " if hint else reason, "cyan")
            heading.append(hint, "green")
            yield Padding(heading, (0, 0, 0, 2), expand=False)
        for line in lines:
            yield Padding(Text(layout.write(line)), (0, 0, 0, 4), expand=False)


def _quantized_cells(rows: list[Row], columns: list[str]) -> tuple[str, ...]:
    first = rows[0]
    if first.tied_to is not None:
        return _name(rows), _array(rows), _tied(rows)
    cells = {
        "array": _array(rows),
        "format": first.format or "",
        "activation": first.activation or "",
        "axis": str(first.axis),
        "bits": f"{first.bits_per_weight:.2f}",
        "before": short_bytes(sum(row.before for row in rows)),
        "after": short_bytes(sum(row.after for row in rows)),
        "SQNR": _sqnr(rows),
    }
    return _name(rows), *(cells[column] for column in columns)


def _dense_cells(rows: list[Row]) -> tuple[str, ...]:
    if rows[0].tied_to is not None:
        return _name(rows), _array(rows), _tied(rows)
    sqnr = _sqnr(rows)
    sqnr = "" if sqnr == "exact" else sqnr
    nbytes = short_bytes(sum(row.after for row in rows))
    return _name(rows), _array(rows), nbytes, sqnr


def _name(rows: list[Row]) -> str:
    return _pattern([row.path for row in rows]) or "(root)"


def _array(rows: list[Row]) -> str:
    first, *others = rows
    array = short_array(first.shape, first.dtype)
    return f"{len(rows)} × {array}" if others else array


def _tied(rows: list[Row]) -> str:
    return f"tied to {_pattern([row.tied_to or '' for row in rows])}"


def _sqnr(rows: list[Row]) -> str:
    sqnr = [row.sqnr for row in rows if row.sqnr is not None]
    if len(sqnr) == 0:
        return ""
    return "exact" if min(sqnr) == math.inf else f"{min(sqnr):.1f} dB"


def _reasons(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    # The largest first.
    groups = _grouped(rows, lambda row: (row.reason, _general_hint(row)))
    found = [
        (reason, group[0].hint if len(group) == 1 else hint, group)
        for (reason, hint), group in groups.items()
    ]
    return sorted(found, key=lambda x: sum(row.after for row in x[-1]), reverse=True)


def _merged(rows: list[Row]) -> list[list[Row]]:
    # Merges arrays that differ only in the numbers in their paths, if there are many.
    return _merged_if(rows, lambda group: len(group) > _few)


def _merged_dense(rows: list[Row]) -> list[list[Row]]:
    # Even a few layers have many dense arrays together, such as norms and biases, so
    # all are counted.
    return _merged_if(rows, lambda group: len(rows) > _few)


def _merged_if(
    rows: list[Row], is_merged: Callable[[list[Row]], bool]
) -> list[list[Row]]:
    groups = _grouped(rows, _without_numbers)
    merged = []
    for row in rows:
        group = groups[_without_numbers(row)]
        if not is_merged(group):
            merged.append([row])
        elif row is group[0]:
            merged.append(group)
    return merged


def _without_numbers(row: Row) -> Row:
    return dataclasses.replace(
        row,
        path=_numbers_starred(row.path),
        tied_to=None if row.tied_to is None else _numbers_starred(row.tied_to),
        sqnr=None,
        hint=_general_hint(row),
    )


def _numbers_starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _pattern(paths: list[str]) -> str:
    parts = zip(*(path.split(".") for path in paths))
    text = ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
    return printable(text)


def _general_hint(row: Row) -> str:
    return row.hint.replace(f'"{row.path}"', "PATH")


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Any]]:
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
