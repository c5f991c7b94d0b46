import hashlib
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray, sqnr
from ..._product import as_tuple
from ..._solvers import AbstractMethod, GPTQ, ScaleSearch, solved
from ..._trace import Gram, Statistics
from ..._tree import check, check_alone
from ._plan import Planned


class Solver:
    """Rounds arrays by a method, each as a whole.

    - `method`: the method.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        stats: Statistics | None,
        method: AbstractMethod | None,
    ):
        check(stats, method)
        self.method = GPTQ() if method is None else method
        check_alone(self.method)
        self._stats = stats
        todo = [p for p in planned if self.takes(p)]
        refused = [p for p in planned if p.format is not None and not self.takes(p)]
        if refused and not todo:
            self._check(refused[0])
        if refused:
            warnings.warn(
                f"{len(refused)} arrays, such as {refused[0].name!r}, are rounded to "
                f"nearest: `method` {self.method} has no scales to choose in "
                f"{refused[0].format}.",
                stacklevel=3,
            )
        missing = [p.name for p in todo if stats is not None and p.name not in stats]
        if missing and len(missing) == len(todo):
            raise ValueError(
                "`stats` should have entries for the arrays to quantize, such as "
                f"{missing[0]!r}. Its entries include {list(stats or ())[:5]}."
            )
        if missing:
            how = "`ScaleSearch()` rounds these" if self.method.needs_gram else ""
            warnings.warn(
                f"`stats` has no entry for {len(missing)} of {len(todo)} arrays, such "
                f"as {missing[0]!r}{how and ': '}{how}.",
                stacklevel=3,
            )

    def takes(self, p: Planned) -> bool:
        """Whether the method rounds an array. Otherwise it is rounded to nearest."""
        return p.format is not None and self.method.applies(p.format)

    def _check(self, p: Planned) -> None:
        assert p.format is not None
        try:
            self.method.check(p.format)
        except ValueError as e:
            raise ValueError(f"Could not convert {p.name!r}: {e}") from e

    def __call__(self, w: np.ndarray, p: Planned) -> tuple[QuantizedArray, float]:
        """Returns the quantized array, and its signal-to-quantization-noise ratio."""
        assert p.format is not None
        gram, method = self._gram(p), self.method
        if gram is None and method.needs_gram:
            method = ScaleSearch()
        sums = (None, None) if gram is None else (gram.value, gram.rows)
        dense = jnp.asarray(w)
        q = solved(dense, p.format, method, *sums, axis=p.axis)
        return q, sqnr(dense, q.dequantize())

    def _gram(self, p: Planned) -> Gram | None:
        if self._stats is None or p.name not in self._stats:
            return None
        axes = tuple(len(p.entry.shape) + i for i in as_tuple(p.axis))
        try:
            return self._stats[p.name, axes]
        except KeyError as e:
            raise ValueError(
                f"`stats` should have its entry along the axis {p.axis}. {e.args[0]}"
            ) from e

    def digest(self) -> str:
        """Returns a digest of everything that affects the rounding."""
        digest = hashlib.sha256(repr(self.method).encode())
        if self._stats is not None:
            digest.update(repr(self._stats).encode())
            for array in jtu.tree_leaves(self._stats):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
