import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...formats import AbstractFormat
from . import _piece
from ._patterns import fields_of, filled, Match, matched
from ._piece import Piece
from ._renamed import as_names, called, rules_of
from ._rules import Quantized, Several, Split, Sum, Transposed


Named = tuple[str, Piece]
# Hints compare a name with at most this many others, because comparing is slow.
_most_compared = 2000


def moved(
    pieces: Sequence[Piece],
    rename: Any,
    shapes: Mapping[str, tuple[int, ...]] | None,
    inverse: bool = False,
) -> tuple[list[Named], list[str], Iterable[str]]:
    """Applies the rules of [`eqquant.interop.renamed`][] to the arrays of a checkpoint.
    `shapes` are those of the arrays of the model, if there is one. Returns pairs of a
    new name and an array; sentences about arrays that could not be made; and, to
    explain these, sentences about patterns that an earlier pattern shadows. Raises a
    `ValueError` or a `TypeError` if `rename` is not a rule."""
    found = [(piece.names[0], piece) for piece in pieces]
    problems: list[str] = []
    hidden: Iterable[str] = ()
    rules = rules_of(rename, inverse)
    for i, rule in enumerate(rules):
        if isinstance(rule, Mapping):
            known = shapes if i + 1 == len(rules) else None
            # Lazy, because these sentences are rarely needed.
            hidden = itertools.chain(hidden, _hidden(found, rule))
            found = _by_patterns(found, rule, known, problems)
        else:
            found = [(new, x) for name, x in found for new in called(rule, name)]
    return found, problems, hidden


class _Group:
    """The arrays that a rule combines to one array, or to parts of one."""

    def __init__(
        self,
        pattern: str | Several,
        new: str | Split | Transposed,
        match: Match,
        format: AbstractFormat | None,
    ):
        self._format = format
        self.patterns = _each(pattern)
        self.pattern, self.new, self.match = pattern, new, match
        self._stacked = _stacked_fields(self.patterns[0], new)
        # The members by their index along new axes, then by their place in the join.
        self._members: dict[tuple[str, ...], dict[int, Named]] = {}

        self._twice: list[str] = []

    def add(self, which: int, match: Match, name: str, piece: Piece) -> None:
        index = tuple(match.fields[field] for field in self._stacked)
        members = self._members.setdefault(index, {})
        if which in members:
            self._twice.append(name)
        members[which] = (name, piece)

    def piece(self) -> Piece:
        """Returns the array that is made of all members. Raises a `ValueError` if a
        member is missing, occurs twice, or does not fit."""
        if self._twice:
            raise ValueError(f"there are two of {self._twice[0]!r}")
        lead, order = self._indices()
        missing = [
            filled(pattern, self.match.stars, self._fields(index), pattern)
            for index in order
            for which, pattern in enumerate(self.patterns)
            if which not in self._members.get(index, {})
        ]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            names = ", ".join(map(repr, missing[:3]))
            raise ValueError(f"there is no {names}{more}")
        each = [self._joined(self._members[index]) for index in order]
        return _piece.stacked(each, lead) if self._stacked else each[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(
            name for members in self._members.values() for name, _ in members.values()
        )

    def _joined(self, members):
        pieces = [members[which][1] for which in range(len(self.patterns))]
        if self._format is not None:
            inputs = -2 if isinstance(self.new, Transposed) else -1
            pieces = [_piece.quantized(x, self._format, inputs) for x in pieces]
        if isinstance(self.pattern, str):
            return pieces[0]
        if isinstance(self.pattern, Sum):
            return _piece.added(pieces)
        return _piece.joined(pieces, self.pattern.axis, self.pattern.groups)

    def _indices(self):
        # Returns the sizes of the new axes, and all expected indices in order.
        for index in self._members:
            if not all(text.isdecimal() and text.isascii() for text in index):
                fields = " and ".join(f"{{{field}}}" for field in self._stacked)
                raise ValueError(
                    f"{fields}, which is not in the new name, should be numbers, to be "
                    f"the place in a stack. Got {', '.join(index)}"
                )
        numbers = {tuple(map(int, index)): index for index in self._members}
        lead = tuple(max(axis) + 1 for axis in zip(*numbers))
        if len(numbers) < len(self._members):
            raise ValueError("two of them have the same numbers")
        # Limited, so that a large number in a name does not make as many indices.
        most = min(math.prod(lead), len(numbers) + 4)
        wanted = (_unraveled(i, lead) for i in range(most))
        return lead, [numbers.get(i, tuple(map(str, i))) for i in wanted]

    def _fields(self, index):
        return self.match.fields | dict(zip(self._stacked, index))


def _by_patterns(found, rule, shapes, problems):
    groups: dict[Any, _Group] = {}
    kept: list[Named | _Group] = []
    for name, piece in found:
        match = _first_match(rule, name)
        if match is None:
            kept.append((name, piece))
            continue
        pattern, which, wildcards = match
        for j, new in enumerate(as_names(rule[pattern])):
            format = None
            if isinstance(new, Quantized):
                new, format = new.name, new.format
            try:
                each = list(_unstacked(piece, wildcards, new))
            except ValueError as e:
                problems.append(f"{name!r} cannot become {_text(new)}: {e}.")
                continue
            for full, part in each:
                key = _key(pattern, full, new) or (len(kept),)
                key = (pattern, j, *key)
                if key not in groups:
                    groups[key] = _Group(pattern, new, full, format)
                    kept.append(groups[key])
                groups[key].add(which, full, name, part)
    result = []
    for item in kept:
        if not isinstance(item, _Group):
            result.append(item)
            continue
        try:
            result += _placed(item, shapes)
        except ValueError as e:
            more = f" and {len(item.names) - 3} more" if len(item.names) > 3 else ""
            names = ", ".join(map(repr, item.names[:3])) + more
            problems.append(f"{names} cannot become {_text(item.new)}: {e}.")
    return result


def _unstacked(piece, match, new):
    # Yields the arrays of a stack, if the new name has fields for their indices, or
    # else the array itself.
    added = [f for f in fields_of(_names_of(new)[0]) if f not in match.fields]
    if not added:
        yield match, piece
        return
    for index, part in _piece.picked(piece, len(added)):
        fields = match.fields | dict(zip(added, map(str, index)))
        yield match._replace(fields=fields), part


def _key(pattern, match, new):
    # Returns a key that is the same for all arrays that are combined to one, or `None`
    # for an array that stays alone. (`load_into` reports if such an array gets the name
    # of another.)
    stacked = _stacked_fields(_first_of(pattern), new)
    if not stacked and not isinstance(pattern, Several):
        return None
    fields = sorted(x for x in match.fields.items() if x[0] not in stacked)
    return match.stars, *fields


def _placed(group, shapes):
    piece, new, match = group.piece(), group.new, group.match
    if isinstance(new, Transposed):
        piece = _piece.transposed(piece)
    pattern = group.patterns[0]
    paths = [filled(n, match.stars, match.fields, pattern) for n in _names_of(new)]
    if not isinstance(new, Split):
        return [(paths[0], piece)]
    sizes = new.sizes
    if sizes is None:
        along = piece.output_axis(new.axis)
        sizes = [_size(path, along, shapes) for path in paths]
    return zip(paths, _piece.parts(piece, sizes, new.axis, new.groups))


def _size(path, axis, shapes):
    if shapes is None:
        raise ValueError(
            "`sizes` of its `Split` should be given, where no model tells them: this "
            "is not the last rule, or it is for a file"
        )
    if path not in shapes:
        raise ValueError(f"there is no {path!r} in `model`{near(path, shapes)}")
    if len(shapes[path]) < -axis:
        raise ValueError(f"{path!r} should have more axes. Got shape {shapes[path]}")
    return shapes[path][axis]


def near(name: str, names: Iterable[str]) -> str:
    """Returns a hint with the most similar name."""
    some = itertools.islice(names, _most_compared)
    found = difflib.get_close_matches(name, some, n=1, cutoff=0.6)
    return f". Is it {found[0]!r}?" if found else ""


def _unraveled(i, shape):
    index = []
    for size in reversed(shape):
        i, last = divmod(i, size)
        index.append(last)
    return tuple(reversed(index))


def _first_match(rule, name):
    for pattern in rule:
        for which, one in enumerate(_each(pattern)):
            match = matched(one, name)
            if match is not None:
                return pattern, which, match
    return None


def _hidden(found, rule):
    # Only patterns of several arrays need this: for a single array, the new name shows
    # which pattern matched.
    for pattern in rule:
        if isinstance(pattern, Several):
            yield from itertools.islice(_taken_before(found, rule, pattern), 1)


def _taken_before(found, rule, pattern):
    for name, _ in found:
        if all(matched(one, name) is None for one in pattern.patterns):
            continue
        first = next(x for x in rule if any(matched(one, name) for one in _each(x)))
        if first is not pattern:
            yield (
                f"`{_text_of(pattern)}` does not apply to {name!r}, since "
                f"`{_text_of(first)}` comes before it and matches, too."
            )


def _text_of(pattern):
    if isinstance(pattern, str):
        return repr(pattern)
    return f"{type(pattern).__name__}({', '.join(map(repr, pattern.patterns))})"


def _each(pattern):
    return pattern.patterns if isinstance(pattern, Several) else (pattern,)


def _first_of(pattern):
    return _each(pattern)[0]


def _stacked_fields(pattern, new):
    kept = fields_of(_names_of(new)[0])
    return [field for field in fields_of(pattern) if field not in kept]


def _names_of(new):
    if isinstance(new, Split):
        return new.names
    return (new.name if isinstance(new, Transposed) else new,)


def _text(new):
    return ", ".join(map(repr, _names_of(new)))
