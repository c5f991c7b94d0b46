import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._any_encoding import any_encoding
from .._array import quantize
from ..formats import NF4
from ..train import LoRA
from ._peers import installed_peers


caption = (
    "Megabytes that the compiled value and gradient of layers tanh(x @ w) with "
    "trainable adapters of rank {rank} allocate while they run. x has {rows} rows; "
    "each w is {width}x{width}, frozen, and would take {dense:.1f} MB in float32."
)
_peers = ("eformer ArrayNF4", "qwix nf4, 64")
# Takes rows, a frozen weight and the two adapters, and returns the product.
_Product = Callable[[Any, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a training step with adapters allocates.

    - `name`: the library, and the format of the frozen weights.
    - `depth`: the number of layers.
    - `scanned`: whether the layers run in a `jax.lax.scan` or in a Python loop.
    - `temporary_bytes`: the memory that the compiled value and gradient allocate,
      besides their arguments and results. `None` if unknown.
    - `failure`: the exception, if compiling failed.
    """

    name: str
    depth: int
    scanned: bool
    temporary_bytes: int | None
    failure: str | None


def measure_memory(
    depths: Sequence[int] = (2, 8, 16),
    *,
    width: int = 512,
    rank: int = 8,
    rows: int = 8,
    peers: bool = False,
) -> list[Memory]:
    """Measures the memory that fine-tuning adapters on 4-bit weights (QLoRA) takes, as
    the compiler reports it. Nothing is run.

    **Arguments:**

    - `depths`: the numbers of layers to measure.
    - `width`: the width of the layers.
    - `rank`: the rank of the adapters.
    - `rows`: the number of rows of a batch.
    - `peers`: whether to measure the other libraries that are installed, too.

    **Returns:**

    A list of [`eqquant.bench.Memory`][]: for this library; for the same model, but with
    each product dequantizing its weight; and for the other libraries.
    """
    w = np.random.default_rng(0).standard_normal((width, width), np.float32)
    w = w / np.sqrt(width, dtype=np.float32)
    measured = []
    for name, weight, product in _candidates(w, peers):
        for scanned in (False, True):
            for depth in depths:
                bytes, failure = None, None
                try:
                    step = _compiled(weight, product, depth, scanned, rank, rows)
                    memory = step.memory_analysis()
                    bytes = None if memory is None else int(memory.temp_size_in_bytes)
                except Exception as e:
                    if name in _peers:
                        failure = f"{type(e).__name__}: {e}".splitlines()[0]
                    else:
                        raise
                measured.append(Memory(name, depth, scanned, bytes, failure))
    return measured


@any_encoding()
def run_memory(*, peers: bool = False, console: Console | None = None) -> list[Memory]:
    """Prints a table of the results of [`eqquant.bench.measure_memory`][].

    **Arguments:**

    - `peers`: whether to measure the other libraries that are installed, too.
    - `console`: the console to print to.

    **Returns:**

    The results.
    """
    console = Console() if console is None else console
    with console.status("Compiling"):
        measured = measure_memory(peers=peers)
    console.print(memory_table(measured))
    text = caption.format(width=512, rank=8, rows=8, dense=4 * 512**2 / 1e6)
    console.print(Text(f"\n{text}"))
    return measured


def memory_table(measured: Sequence[Memory]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(Text("layers"))
    by_name: dict[str, list[Memory]] = {}
    for row in measured:
        by_name.setdefault(row.name, []).append(row)
    first, *_ = by_name.values()
    for row in first:
        loop = "scanned" if row.scanned else "unrolled"
        table.add_column(f"{row.depth},\n{loop}", justify="right")
    for name, group in by_name.items():
        label = Text(name)
        for failure in sorted({row.failure for row in group if row.failure}):
            label.append(f"\n  {failure}", "red")
        sizes = [row.temporary_bytes for row in group]
        table.add_row(label, *("" if s is None else f"{s / 1e6:.2f}" for s in sizes))
    return table


def _candidates(w, peers) -> list[tuple[str, Any, _Product]]:
    def adapted(x, w, a, b):
        return x @ LoRA(w, a, b, None, None, axis=-2, scale=1.0)

    def beside(product):
        return lambda x, w, a, b: product(x, w) + (x @ a.T) @ b.T

    q = quantize(w, NF4())
    candidates = [
        ("eqquant NF4()", q, adapted),
        ("  dequantized", q, beside(lambda x, w: x @ w.dequantize())),
    ]
    for peer in installed_peers() if peers else ():
        if peer.name in _peers:
            made = peer.make(w)
            candidates.append((peer.name, made.weight, beside(made.fn)))
    return candidates


def _compiled(weight, product, depth, scanned, rank, rows):
    leaves, treedef = jtu.tree_flatten(weight)
    n, k = weight.shape[-1], weight.shape[-2]

    def layer(x, parts):
        leaves, (a, b) = parts
        return jnp.tanh(product(x, treedef.unflatten(leaves), a, b)), None

    def loss(adapters, frozen, x):
        if scanned:
            x, _ = lax.scan(layer, x, (frozen, adapters))
        else:
            for parts in zip(frozen, adapters, strict=True):
                x, _ = layer(x, parts)
        return jnp.sum(x**2)

    adapters = [(jnp.zeros((rank, k)), jnp.zeros((n, rank)))] * depth
    frozen = [leaves] * depth
    if scanned:
        stack = lambda *layers: jnp.stack(layers)
        adapters, frozen = (jtu.tree_map(stack, *x) for x in (adapters, frozen))
    x = jr.normal(jr.key(0), (rows, k))
    return jax.jit(jax.value_and_grad(loss)).lower(adapters, frozen, x).compile()
