import bisect
import functools as ft
import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...formats import (
    AbstractComposite,
    AbstractFormat,
    AbstractGGUFBytes,
    AbstractGrid,
    Int8,
)
from .._problem import Problem
from ._codes import integer_step
from ._xla import fuses


# The times of kernels, from `costs/*.json`, which `python -m eqquant.bench costs`
# writes. (The `note` of a file lists changes made by hand.) Each kind of weight has its
# own costs.


class Cost(NamedTuple):
    """The time of a kernel, in picoseconds on one core.

    - `rows`: some numbers of rows, in increasing order.
    - `each`: for these numbers of rows, the time per number of the weight. It is linear
        between them, and beyond the last.
    - `inputs`: the time per number of the inputs.
    """

    rows: Sequence[int]
    each: Sequence[float]
    inputs: float

    def of(self, rows: int) -> float:
        """Returns the time for each number of the weight."""
        if len(self.rows) == 1:
            return self.each[0]
        i = bisect.bisect(self.rows, rows, 1, len(self.rows) - 1)
        (m, n), (a, b) = self.rows[i - 1 : i + 1], self.each[i - 1 : i + 1]
        return max(a + (b - a) * (rows - m) / (n - m), 0.0)


class Kind(NamedTuple):
    """The properties of a product that determine its time, apart from its sizes.

    - `product`: as in `Problem`.
    - `name`: the name of the format, without those that wrap it.
    - `bits`: the bits of a code.
    - `points`: the points of a grid's codes: `"integers"`, or entries of a `"table"`.
        Otherwise empty.
    - `offset`: as in `AbstractGrid`.
    - `short`: whether blocks have fewer than 64 codes.
    - `activation`: whether the inputs are quantized to 8 bits, with one scale for each
      row.
    - `panels`: whether rows lie in panels.
    """

    product: str
    name: str
    bits: float
    points: str
    offset: str | None
    short: bool
    activation: bool
    panels: bool

    @property
    def family(self) -> str:
        """The family of packings: `"RSR"`, `"Trellis"`, `"GGUF"`, or `""` for grids."""
        if self.points:
            return ""
        for family in ("RSR", "Trellis"):
            if self.name.startswith(family):
                return family
        return "GGUF"

    def far(self, other: "Kind") -> float:
        """Returns the distance to another kind, weighted by the influence on time."""
        return (
            1000 * (self.product != other.product)
            + 500 * (self.panels != other.panels)
            + 200 * (self.activation != other.activation)
            + 100 * (self.family != other.family)
            + 10 * abs(self.bits - other.bits)
            + 8 * (self.points != other.points)
            + 4 * (self.offset != other.offset)
            + 2 * (self.short != other.short)
            + (self.name != other.name)
        )


def _base(format: AbstractFormat) -> AbstractFormat:
    while isinstance(format, AbstractComposite) and not isinstance(
        format, AbstractGGUFBytes
    ):
        format = format.base
    return format


@ft.lru_cache(maxsize=4096)
def kind_of(
    product: str,
    format: AbstractFormat,
    activation: AbstractFormat | None,
    panels: bool,
) -> Kind:
    """Returns the kind of a product."""
    format = _base(format)
    rounds = isinstance(activation, Int8) and activation.block_size is None
    name, bits = type(format).__name__, float(format.bits)
    if not isinstance(format, AbstractGrid):
        return Kind(product, name, bits, "", None, False, rounds, panels)
    points = "table" if integer_step(format) is None else "integers"
    short = format.block_size is not None and format.block_size < 64
    offset = format.offset
    return Kind(product, name, bits, points, offset, short, rounds, panels)


class Processor(NamedTuple):
    """Describes a processor.

    - `vendor`, `family`: as reported by Linux. (AMD's families have their own costs,
        even with the same instruction sets.) `None` if they are not known, or if costs
        are for any processor.
    - `features`: the instruction sets that kernels use there.
    """

    vendor: str | None
    family: int | None
    features: frozenset[str]


class Machine(NamedTuple):
    """The costs of kernels on a machine.

    - `name`: the machine and the version of JAX, in words.
    - `processor`: its processor.
    - `fuses`: whether JAX is 0.11 or newer.
    - `costs`: for each kind, the costs of kernels.
    """

    name: str
    processor: Processor
    fuses: bool
    costs: Mapping[Kind, Mapping[str, Cost]]

    @classmethod
    def read(cls, path: pathlib.Path) -> "Machine":
        found = json.loads(path.read_text("utf-8"))
        costs = {
            Kind(*kind): {name: Cost(*cost) for name, cost in of_kernels.items()}
            for kind, of_kernels in found["costs"]
        }
        features = frozenset(found["features"])
        processor = Processor(found["vendor"], found["family"], features)
        return cls(found["name"], processor, found["fuses"], costs)

    @property
    def families(self) -> set[str]:
        """The families of packings whose kernels were measured."""
        return {kind.family for kind in self.costs}

    def of(self, kind: Kind) -> Mapping[str, Cost]:
        """Returns the costs of the nearest kind that was measured."""
        if kind in self.costs:
            return self.costs[kind]
        return self.costs[min(self.costs, key=kind.far)]


_folder = pathlib.Path(__file__).with_name("costs")


@ft.cache
def _machines() -> list[Machine]:
    """Returns the machines that were measured."""
    return [Machine.read(path) for path in sorted(_folder.glob("*.json"))]


def measured_machine(format: AbstractFormat) -> Machine:
    """Returns the machine that is most like this one, of those on which the kernels of
    a format were measured: with as many as possible of its instruction sets, and no
    others."""
    level = os.environ.get("EQQUANT_NATIVE_LEVEL")
    return _machine(level, kind_of("matmul", format, None, False).family)


# The order of instruction sets by which `EQQUANT_NATIVE_LEVEL` limits them, on x86 and
# on ARM.
_levels = ("avx2", "avx_vnni", "avx512", "avx512_bf16", "amx")
_arm_levels = ("neon", "neon_dot", "neon_i8mm")
# No ARM processor was measured, so these take the costs of similar kernels for x86.
_like_arm = {"neon": "avx2", "neon_dot": "avx_vnni", "neon_i8mm": "avx_vnni"}
_flags = {
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx",
    "asimd": "neon",
    "asimddp": "neon_dot",
    "i8mm": "neon_i8mm",
}


def describe_processor() -> Processor:
    """Describes this processor, with the instruction sets that kernels use here."""
    return _processor(os.environ.get("EQQUANT_NATIVE_LEVEL"))


def _processor(level):
    info = processor()
    flags = info.get("flags") or info.get("Features") or ""
    found = {_flags[flag] for flag in flags.split() if flag in _flags}
    if platform.machine() == "arm64":  # macOS has no such list.
        found = set(_arm_levels)
    for levels in (_levels, _arm_levels):
        if level in levels:
            found &= set(levels[: levels.index(level) + 1])
    if "avx512" in found:
        found.discard("avx_vnni")  # AVX512 has the same products at twice the width.
    family = info.get("cpu family")
    family = None if family is None else int(family)
    return Processor(info.get("vendor_id"), family, frozenset(found))


@ft.cache
def _machine(level: str | None, packings: str = "") -> Machine:
    """Returns the machine that is most like this one, of those on which the kernels of
    a family of packings were measured."""
    vendor, family, features = _processor(level)
    arm = features & set(_arm_levels)
    features = frozenset(_like_arm.get(feature, feature) for feature in features)

    def far(found):
        its = found.processor
        families = None not in (its.family, family)
        return (
            len(its.features - features),
            its.vendor not in (None, vendor),
            len(features - its.features),
            abs(its.family - family) if families else 0,
            found.fuses != fuses,
        )

    machines = [machine for machine in _machines() if packings in machine.families]
    nearest = min(machines, key=far)
    if not arm:
        return nearest
    return nearest._replace(name=f"{nearest.name}, since no ARM processor was measured")


def processor() -> dict[str, str]:
    """Returns Linux's description of the first processor; empty on other systems."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first, *_ = path.read_text("utf-8").split("\n\n")
    pairs = [line.partition(":") for line in first.splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


@ft.lru_cache(maxsize=4096)
def _of_kernel(name, level, *of_kind):
    kind = kind_of(*of_kind)
    return _machine(level, kind.family).of(kind).get(name)


# The number of rows to assume if it is not known when compiling.
_unknown = 64


def measured(name: str) -> Callable[[Problem], float]:
    """Returns a function that predicts the time of a kernel in seconds on one core,
    from the measurements on the machine that is most like this one. Infinite if the
    kernel was not measured there."""

    def seconds(problem: Problem) -> float:
        layout = problem.layout
        cost = _of_kernel(
            name,
            os.environ.get("EQQUANT_NATIVE_LEVEL"),
            problem.product,
            layout.format,
            problem.activation,
            layout.panels is not None,
        )
        if cost is None:
            return math.inf
        rows = _unknown if problem.rows is None else problem.rows
        inputs = problem.stack * rows * problem.terms
        return 1e-12 * (problem.numbers * cost.of(rows) + inputs * cost.inputs)

    return seconds
