import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..formats import AbstractFormat, Layout, round_trip
from ..kernels import Product
from ._specs import as_entry, full_spec, names_of
from ._splits import splits_evenly, splits_rows


# The mesh axes that split one axis of an array.
Names = tuple[str, ...]


class Split(NamedTuple):
    """The mesh axes over which a product is split, along each of its axes."""

    stack: tuple[Names, ...]
    rows: tuple[Names, ...]
    n: Names
    k: Names

    @property
    def names(self) -> set[str]:
        return {
            name
            for names in (*self.stack, *self.rows, self.n, self.k)
            for name in names
        }

    def contracted(self, product: Product) -> Names:
        return self.k if product == "matmul" else self.n

    def x(self, product: Product) -> PartitionSpec:
        return _spec(*self.stack, *self.rows, self.contracted(product))

    def y(self, product: Product) -> PartitionSpec:
        out = self.n if product == "matmul" else self.k
        return _spec(*self.stack, *self.rows, out)

    def leaf(self, shape: Sequence[int], layout: Layout) -> PartitionSpec:
        """Returns the spec of a stored array of this shape."""
        entries = layout.by_row((*self.stack, self.n, self.k))
        return _spec(*[() if i == 1 else names for i, names in zip(shape, entries)])


def _spec(*entries: Names) -> PartitionSpec:
    return PartitionSpec(*map(as_entry, entries))


def without(spec: PartitionSpec, entry: Any) -> PartitionSpec:
    """Returns a spec without the mesh axes of `entry`."""
    names = names_of(entry)
    return _spec(*[tuple(i for i in names_of(e) if i not in names) for e in spec])


def split(
    x: Sequence[Any],
    w: Sequence[Any],
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    sizes: Mapping[str, int],
    format: AbstractFormat,
) -> Split:
    """Decides how to split a product, from the specs of `x[*b, *rows, _]` and of
    `W[*b, n, k]`.

    The rows of `x` stay in place: if the weight is split over the same mesh axes, its
    codes are gathered. The other axes are split like the weight. Mesh axes that would
    give parts of different sizes, or cut through a block, are dropped.
    """
    # No mesh axis can split two axes of a product: `used` holds the axes already taken.
    used = set()

    def take(entry, size, fits=lambda shards: True):
        taken = ()
        for name in names_of(entry):
            shards = math.prod(sizes[i] for i in (*taken, name))
            if name in used or size % shards != 0 or not fits(shards):
                break
            taken = (*taken, name)
        used.update(taken)
        return taken

    *w_stack, n, k = w
    number = len(w_stack)
    *stack_shape, n_size, k_size = w_shape
    stack = tuple(take(i, size) for i, size in zip(x, stack_shape))
    rows = tuple(map(take, x[number:-1], x_shape[number:-1]))
    stack = tuple(
        names or take(i, size) for names, i, size in zip(stack, w_stack, stack_shape)
    )
    across = lambda shards: splits_rows(format, n_size, shards)
    along = lambda shards: splits_evenly(format, w_shape[:-1], k_size, shards)
    return Split(stack, rows, take(n, n_size, across), take(k, k_size, along))


# The product that one device computes: `fn(x, leaves, activation)`.
Fn: TypeAlias = Callable[[Array, Sequence[Array], AbstractFormat | None], Array]


@dataclasses.dataclass(frozen=True)
class Partition:
    """A product that is partitioned over devices. Each device multiplies its rows by
    its part of the weight; if the contracted axis is split, the results are summed over
    devices. Codes may be sent between devices, but never decoded weights.

    - `product`, `layout`, `activation`: as in a `Problem`.
    - `w_shape`: `*b n k`.
    """

    product: Product
    layout: Layout
    activation: AbstractFormat | None
    w_shape: tuple[int, ...]

    def split(
        self,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[tuple[int, ...]],
        sizes: Mapping[str, int],
    ) -> Split:
        """Returns the split of the product, from the specs of `x` and of the stored
        arrays."""
        x, *leaves = [full_spec(spec, len(s)) for spec, s in zip(specs, shapes)]
        # The spec of the codes, the largest stored array, is the spec of the weight.
        codes = max(range(len(leaves)), key=lambda i: math.prod(shapes[1 + i]))
        w = self.layout.by_row(tuple(leaves[codes]))
        return split(tuple(x), w, shapes[0], self.w_shape, sizes, self.layout.format)

    def specs(
        self, parts: Split, shapes: Sequence[tuple[int, ...]]
    ) -> list[PartitionSpec]:
        """Returns the specs that the operands should have."""
        x = parts.x(self.product)
        if self._by_whole_rows(parts):
            x = PartitionSpec(*x[:-1], None)
        return [x, *[parts.leaf(shape, self.layout) for shape in shapes[1:]]]

    def on_device(
        self, fn: Fn, parts: Split, scattered: int | None = None
    ) -> Callable[..., Array]:
        """Returns the function that each device applies to its parts of the operands. A
        sum over devices may leave its result `scattered` over them along an axis."""
        names = parts.contracted(self.product)
        by_whole_rows = self._by_whole_rows(parts)

        def total(y):
            if len(names) == 0:
                return y
            if scattered is None:
                return lax.psum(y, names)
            return lax.psum_scatter(y, names, scatter_dimension=scattered, tiled=True)

        def run(x, *leaves):
            if not by_whole_rows:
                return total(fn(x, leaves, self.activation))
            assert self.activation is not None
            dtype = x.dtype
            wide = dtype if dtype.itemsize > 4 else jnp.float32
            x = round_trip(x.astype(wide), self.activation).astype(wide)
            size = x.shape[-1] // lax.axis_size(names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, -1)
            return total(fn(x, leaves, None)).astype(dtype)

        return run

    def _by_whole_rows(self, parts):
        # Part of a row has another dynamic scale than the whole row, so `x` is gathered
        # and rounded before it is split.
        return self.activation is not None and len(parts.contracted(self.product)) > 0


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """Returns the mesh in Explicit mode that the types of arrays carry, or `None`."""
    meshes = [a.sharding.mesh for a in avals if a.sharding.mesh.explicit_axes]
    return meshes[0] if meshes else None


def split_of_types(partition: Partition, mesh: Any, avals: Sequence[Any]) -> Split:
    """Returns the split of the product, from the shardings that types carry."""
    placed = [a.sharding.spec for a in avals]
    return partition.split(placed, [a.shape for a in avals], mesh.shape)


def over_types(partition: Partition, fn: Fn, mesh: Any, operands: list[Array]) -> Array:
    """Runs the product under `shard_map`, split as the types of the operands say."""
    parts = split_of_types(partition, mesh, [jax.typeof(a) for a in operands])
    return _on_mesh(partition, fn, mesh, operands, parts, set(mesh.explicit_axes))


def within_manual(
    avals: Sequence[Any], declared: NamedSharding
) -> NamedSharding | None:
    """Returns the declared sharding over the Auto mesh axes that are left inside a
    `shard_map` over the others. `None` outside of a `shard_map`, or if no axes are
    left."""
    mesh = avals[0].sharding.mesh
    if not mesh.manual_axes or not mesh.auto_axes:
        return None
    names = {name for entry in declared.spec for name in names_of(entry)}
    gone = tuple(names - set(mesh.auto_axes))
    return NamedSharding(mesh, without(declared.spec, gone))


def as_declared(
    partition: Partition, fn: Fn, declared: NamedSharding, operands: list[Array]
) -> Array:
    """Runs the product under `shard_map`, split as declared for the weight, for
    operands of otherwise unknown sharding. The rows of `x` are split over the other
    mesh axes as far as these divide their number."""
    x, *_ = operands
    mesh, number = declared.mesh, len(partition.w_shape)
    spec = (*[None] * number, *declared.spec)[-number:]
    used = [name for entry in spec for name in names_of(entry)]
    others = tuple(name for name in mesh.auto_axes if name not in used)
    rows = [others, *[None] * (x.ndim - number + 1)]
    placed = [None] * (number - 2) + rows
    w_shape, format = partition.w_shape, partition.layout.format
    parts = split(placed, spec, x.shape, w_shape, mesh.shape, format)
    return _on_mesh(partition, fn, mesh, operands, parts, set(mesh.auto_axes))


def _on_mesh(partition, fn, mesh, operands, parts, axes):
    specs = partition.specs(parts, [a.shape for a in operands])
    if mesh.explicit_axes:
        operands = [
            jax.sharding.reshard(a, NamedSharding(mesh, spec))
            for a, spec in zip(operands, specs)
        ]
    on_devices = jax.shard_map(
        partition.on_device(fn, parts),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=parts.y(partition.product),
        axis_names=axes,
        check_vma=False,
    )
    return on_devices(*operands)


def known_to_compiler(ctx: mlir.LoweringRuleContext, mesh: Any) -> Any:
    """Returns the context of a lowering, with the devices of a mesh filled in. `None`
    if the program is for other devices, for one device, or for export."""
    module = ctx.module_context
    context = module.axis_context
    if not isinstance(context, mlir.ShardingContext):
        return None
    if context.num_devices != mesh.size or mesh.size == 1:
        return None
    if module.lowering_parameters.for_export:
        return None
    # XLA identifies devices by position, so any will do for an abstract mesh.
    if isinstance(mesh, Mesh):
        devices, mesh = tuple(mesh.devices.flat), mesh.abstract_mesh
    else:
        devices = tuple(jax.devices()[: mesh.size])
    if len(devices) < mesh.size:
        return None
    context = mlir.ShardingContext(context.num_devices, devices, mesh)
    return ctx.replace(module_context=module.replace(axis_context=context))


def by_compiler(partition: Partition, fn: Fn, operands: list[Array]) -> Array:
    """Runs the product where XLA's partitioner decides how arrays are placed: it calls
    back with its decision, and gets the program of one device."""

    *_, n, k = partition.w_shape
    out = n if partition.product == "matmul" else k

    # JAX reads only the shape and dtype of the result: `decide` replaces the function.
    def whole(x, *leaves):
        return jnp.zeros((*x.shape[:-1], out), x.dtype)

    def decide(mesh, arguments, result):
        shapes = [a.shape for a in arguments]
        specs = [a.sharding.spec for a in arguments]
        to = full_spec(result.sharding.spec, len(result.shape))
        # Mesh axes that split the result's last axis are not used for the rows of `x`:
        # XLA found that sending the rows is cheaper than sending the weight.
        specs[0] = without(specs[0], to[-1])
        parts = partition.split(specs, shapes, mesh.shape)
        place = ft.partial(NamedSharding, mesh)
        wanted = tuple(map(place, partition.specs(parts, shapes)))
        y = parts.y(partition.product)
        names = parts.contracted(partition.product)
        scattered = None
        # If the result should be split over the axes that are summed over, a
        # reduce-scatter gives each device its part of the sum.
        for i, entry in enumerate(to):
            if names and names_of(entry) == (*names_of(y[i]), *names):
                scattered = i
                y = PartitionSpec(*y[:i], entry, *y[i + 1 :])
        return mesh, partition.on_device(fn, parts, scattered), place(y), wanted

    rule, sizes = _rule(partition, [a.shape for a in operands])
    wrapped = custom_partitioning(whole)
    wrapped.def_partition(decide, sharding_rule=rule, **sizes)  # pyright: ignore
    return wrapped(*operands)


def _rule(partition, shapes):
    # An `einsum`-like rule of Shardy. The factor `u` stands for the units that `k` can
    # be split into; each stored array has a whole number of positions for each unit.
    *stack_shape, n, k = partition.w_shape
    by_row = partition.layout.by_row
    x_shape, *leaves = shapes
    number = len(stack_shape)
    units = _units(partition, k, [by_row(s)[-1] for s in leaves])
    sizes = {"u": units}

    def along_k(size, name):
        if units == 1 or size == 1:
            return name
        if size == units:
            return "u"
        sizes[name] = size // units
        return f"(u {name})"

    stack = [f"b{i}" for i in range(number)]
    rows = [f"r{i}" for i in range(len(x_shape) - number - 1)]
    old, new = "n", along_k(k, "k")
    if partition.product == "matmul":
        old, new = new, old
    terms = [[*stack, *rows, old]]
    for i, shape in enumerate(leaves):
        *_, n_size, k_size = by_row(shape)
        row = "n" if n_size == n else f"s{i}"
        names = by_row((*stack, row, along_k(k_size, f"k{i}")))
        terms.append([*names])
    left = ", ".join(map(" ".join, terms))
    result = [*stack, *rows, new]
    compound = any("(" in name for term in [*terms, result] for name in term)
    if not compound or any("u" in term for term in [*terms, result]):
        sizes.pop("u")  # JAX takes no size of a factor that is an axis, or of none.
    return f"{left} -> {' '.join(result)}", sizes


def _units(partition, k, sizes):
    # The largest number of shards of `k` that each end with a block and a byte, and
    # divide the contracted axis of every stored array.
    whole = math.gcd(k, *[size for size in sizes if size > 1])
    *lead, _ = partition.w_shape
    return next(
        i
        for i in range(whole, 0, -1)
        if whole % i == 0 and splits_evenly(partition.layout.format, lead, k, i)
    )
