from collections.abc import Iterator
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Gram(eqx.Module):
    """The Gram matrix of the inputs of a weight.

    - `value`: `x^T x`, summed over the rows `x` that meet the weight: `*lead k k`; or
        its diagonal, `*lead k`. `lead` has an axis for each axis of the weight that is
        not contracted, of size one if the rows are the same all along it. A size in
        between divides the axis into equal parts.
    - `rows`: the number of rows.
    - `contracted`: the axes of the weight that the products contract. `k` runs over
        them in this order.
    """

    value: Float[Array, "..."]
    rows: Float[Array, "*lead"]
    contracted: tuple[int, ...] = eqx.field(static=True)

    @property
    def is_diagonal(self) -> bool:
        """Whether only the diagonal is stored."""
        return self.value.ndim == self.rows.ndim + 1

    @property
    def diagonal(self) -> Float[Array, "*lead k"]:
        """The sum of squares of each input."""
        if self.is_diagonal:
            return self.value
        return jnp.diagonal(self.value, axis1=-2, axis2=-1)

    def along(self, axes: tuple[int, ...], shape: tuple[int, ...]) -> "Gram":
        """Returns the Gram of a weight of this shape along some axes, which may differ
        from the contracted axes in axes of size one, and in their order."""
        if self.contracted == axes:
            return self
        others = lambda axes: [i for i in range(len(shape)) if i not in axes]
        sizes = dict(zip(others(self.contracted), self.rows.shape))
        lead = tuple(sizes.get(i, 1) for i in others(axes))
        long = lambda axes: [i for i in axes if shape[i] != 1]
        order = [long(self.contracted).index(i) for i in long(axes)]
        value = self.value.reshape(*lead, *self.value.shape[self.rows.ndim :])
        if order != sorted(order):
            value = _reordered(value, len(lead), long(self.contracted), order, shape)
        return Gram(value, self.rows.reshape(lead), axes)

    def scaled(self, scales: Float[Array, "*steps k"]) -> "Gram":
        """Returns the Gram of the inputs multiplied by scales. `steps` are the first
        axes of `lead`; along the others, the scales are the same."""
        after = [1] * (self.rows.ndim - scales.ndim + 1)
        scales = scales.reshape(*scales.shape[:-1], *after, scales.shape[-1])
        square = scales**2
        if not self.is_diagonal:
            square = scales[..., None, :] * scales[..., :, None]
        return Gram(self.value * square, self.rows, self.contracted)


def _reordered(value, lead, axes, order, shape):
    # Splits each index over the inputs by axes, and permutes these.
    inner = value.shape[lead:]
    sizes = [shape[i] for i in axes] * len(inner)
    places = [lead + n * len(order) + i for n in range(len(inner)) for i in order]
    value = value.reshape(*value.shape[:lead], *sizes)
    value = jnp.transpose(value, (*range(lead), *places))
    return value.reshape(*value.shape[:lead], *inner)


def is_along(
    axes: tuple[int, ...], others: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
    """Whether `axes` and `others` are the same, except for axes of size one."""
    first, second = ({i for i in each if shape[i] != 1} for each in (axes, others))
    return first == second


# A weight, its contracted axes, and the number of its Gram.
Places = tuple[tuple[str, tuple[int, ...], int], ...]


# Leaves with their axes of channels, or weights with their contracted axes.
Paths: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


class Statistics(eqx.Module):
    """Sums of the inputs of the weights of a model, as made by [`eqquant.calibrate`][]:
    `stats["layers.0.weight"]` is a [`eqquant.Gram`][].

    Weights that meet the same inputs share one array. `+` adds two `Statistics` of the
    same model, and gives the statistics of all their batches.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        stats["layers.0.weight"].value
        stats += eqquant.calibrate(fn, model, more)

        eqquant.save("stats.safetensors", stats.as_tree())
        stats = eqquant.Statistics.from_tree(eqquant.load("stats.safetensors"))
        ```

    - `incomplete`: the paths of weights with products that could not be summed, each
        with the reason.
    - `folds`: arrays that scale the inputs of some weights, such as the weight of a
        norm, and these weights. Each has its path and its axes of channels. Dividing
        the former by a scale for each channel, and multiplying the latter by it, does
        not change the outputs of the model.
    """

    _values: tuple[Array | np.ndarray, ...]
    _rows: tuple[Array, ...]
    _places: Places = eqx.field(static=True)
    incomplete: tuple[tuple[str, str], ...] = eqx.field(static=True, default=())
    folds: tuple[tuple[Paths, Paths], ...] = eqx.field(static=True, default=())

    def __getitem__(self, key: str | tuple[str, tuple[int, ...]]) -> Gram:
        path, axes = (key, None) if isinstance(key, str) else key
        if path not in self:
            raise KeyError(f"No products of `{path}` were seen. Got {list(self)}.")
        kinds = {axes: i for name, axes, i in self._places if name == path}
        if axes is None and len(kinds) > 1:
            raise KeyError(
                f"`{path}` is contracted along several axes: {[*kinds]}. Pass one of "
                f"them: `stats[{path!r}, {[*kinds][0]}]`."
            )
        axes = [*kinds][0] if axes is None else axes
        if axes not in kinds:
            raise KeyError(
                f"`{path}` is not contracted along the axes {axes}, but along "
                f"{' and '.join(map(str, kinds))}."
            )
        return self._gram(kinds[axes], axes)

    def _gram(self, i: int, axes: tuple[int, ...]) -> Gram:
        return Gram(jnp.asarray(self._values[i]), self._rows[i], axes)

    def along(self, path: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> Gram:
        """Returns the Gram of a weight of this shape along some axes, which may differ
        from the contracted axes in axes of size one."""
        kinds = self.contracted(path)
        same = [each for each in kinds if is_along(each, axes, shape)]
        return self[path, same[0] if same else axes].along(axes, shape)

    def contracted(self, path: str) -> list[tuple[int, ...]]:
        """Returns the distinct axes along which products contract a weight."""
        return [axes for name, axes, _ in self._places if name == path]

    def __contains__(self, path: str) -> bool:
        return any(name == path for name, _, _ in self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _, _ in self._places))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def scaled(self, weights: Paths, scales: Float[Array, "*steps k"]) -> "Statistics":
        """Returns the statistics of inputs of some weights multiplied by scales."""
        each = {i for *place, i in self._places if tuple(place) in weights}
        of = lambda i: self._gram(i, ()).scaled(scales).value
        values = (of(i) if i in each else a for i, a in enumerate(self._values))
        return Statistics(
            tuple(values), self._rows, self._places, self.incomplete, self.folds
        )

    @property
    def few_rows(self) -> tuple[str, ...]:
        """The weights that have a matrix with fewer rows than inputs, so that its Gram
        is singular."""
        few = {
            i
            for i, (value, rows) in enumerate(zip(self._values, self._rows))
            # (As a NumPy array, known under `jax.jit`, too.)
            if np.min(np.asarray(rows), initial=np.inf) < value.shape[-1]
        }
        return tuple(dict.fromkeys(name for name, _, i in self._places if i in few))

    @property
    def nbytes(self) -> int:
        """The number of bytes of all sums."""
        return sum(a.nbytes for a in (*self._values, *self._rows))

    def __add__(self, other: "Statistics") -> "Statistics":
        if not isinstance(other, Statistics):
            return NotImplemented
        shapes = [a.shape for a in self._values]
        if self._places != other._places or shapes != [a.shape for a in other._values]:
            raise ValueError(
                "`+` takes statistics of the same model and function. Got "
                f"statistics of {list(self)} and of {list(other)}."
            )
        add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
        return Statistics(
            add(self._values, other._values),
            add(self._rows, other._rows),
            self._places,
            tuple(dict.fromkeys((*self.incomplete, *other.incomplete))),
            tuple(fold for fold in self.folds if fold in other.folds),
        )

    def as_tree(self) -> dict[str, Any]:
        """Returns the same as a tree of dicts, lists, arrays and integers, for
        [`eqquant.save`][]."""
        weights: dict[str, Any] = {path: [] for path in self}
        for path, contracted, i in self._places:
            weights[path].append([i, *contracted])
        return {
            "values": list(self._values),
            "rows": list(self._rows),
            "weights": weights,
            "incomplete": {path: {why: 1} for path, why in self.incomplete},
            "folds": [
                {"factors": _as_lists(factors), "weights": _as_lists(weights)}
                for factors, weights in self.folds
            ],
        }

    @staticmethod
    def from_tree(tree: Any) -> "Statistics":
        """The inverse of `as_tree`. Sums that are NumPy arrays, such as memory maps of
        a file, become JAX arrays one at a time, when they are read."""
        kinds = {"values": list, "rows": list, "weights": dict}
        if not isinstance(tree, dict) or not all(
            isinstance(tree.get(key), kind) for key, kind in kinds.items()
        ):
            got = sorted(tree) if isinstance(tree, dict) else type(tree).__name__
            raise ValueError(
                f"`tree` should come from `Statistics.as_tree`. Got a tree of {got}."
            )
        places = tuple(
            (path, tuple(map(int, contracted)), int(i))
            for path, found in tree["weights"].items()
            for i, *contracted in found
        )
        incomplete = tuple(
            (path, why)
            for path, whys in tree.get("incomplete", {}).items()
            for why in whys
        )
        folds = tuple(
            (_as_paths(fold["factors"]), _as_paths(fold["weights"]))
            for fold in tree.get("folds", ())
        )
        values, rows = tuple(tree["values"]), tuple(map(jnp.asarray, tree["rows"]))
        return Statistics(values, rows, places, incomplete, folds)

    def __repr__(self) -> str:
        lines = [f"Statistics of {len(self)} weights, {self.nbytes:,} bytes"]
        width = max((len(path) for path in self), default=0)
        first: dict[int, str] = {}
        for path, axes, i in self._places:
            lines.append(f"  {path:{width}}  {self._line(axes, i, first.get(i))}")
            first.setdefault(i, path)
        lines += [f"  {path}: incomplete, {why}" for path, why in self.incomplete]
        return "\n".join(lines)

    def _line(self, axes: tuple[int, ...], i: int, same: str | None) -> str:
        if same is not None:
            return f"as {same}"
        value, rows = self._values[i], self._rows[i]
        shape = ", ".join(map(str, value.shape))
        kind = "diagonals" if value.ndim == rows.ndim + 1 else "float32"
        return f"{kind}[{shape}] along {axes}{_rows(rows)}"


def _as_lists(paths: Paths) -> dict[str, list[int]]:
    return {path: list(axes) for path, axes in paths}


def _as_paths(lists: dict[str, list[int]]) -> Paths:
    return tuple((path, tuple(map(int, axes))) for path, axes in lists.items())


def _rows(rows: Any) -> str:
    if isinstance(rows, jnp.ndarray) and rows.size:
        low, high = int(jnp.min(rows)), int(jnp.max(rows))
        return f", {low} rows" if low == high else f", {low} to {high} rows"
    return ""
