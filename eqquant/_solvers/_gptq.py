from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp

from .._array import check_number
from ._descent import descended
from ._gram import damped, filled, normalised
from ._ldlq import ldlq, ldlq_given
from ._method import AbstractMethod, squared_losses
from ._rounding import in_blocks, Rounding
from ._scale_search import ScaleSearch
from ._tiles import refitted_rows, rounded_tiles


class GPTQ(AbstractMethod):
    """Rounds one column after another, so that later columns compensate for the errors
    of earlier ones. Searches for the scale of each block on the way, then improves all
    codes and scales by coordinate descent. The objective is the squared error of the
    products with the inputs from which the Gram matrix was computed.

    - `damping`: added to the diagonal of the Gram, in units of its mean.
    - `order`: the order in which columns are rounded; codes are stored in the order of
      the weight. `"groups"` sorts blocks, and columns within each block, from the
      largest inputs to the smallest. `"act"` sorts all columns by the size of their
      inputs, and searches for the scales beforehand. `"none"` goes from the first
      column to the last.
    - `tries`: how many of the most promising scales of each block are evaluated with
        error feedback. By default 8, and 32 for formats of at most four levels, which
        gain by it.
    - `passes`: the number of passes of coordinate descent over all columns.

    In formats that choose the numbers of a tile together, such as
    [`eqquant.Trellis`][], tiles are rounded one after another, from the last of a row
    to the first. Within a tile, each candidate path compensates for its own errors. The
    scale of each row is fitted at the end, by least squares. `order`, `tries` and
    `passes` have no effect for these formats.

    All computations are in float32. If a Gram is singular in float32, so that it has no
    Cholesky factor, it gets more damping: 1e-6 of the mean diagonal, then ten times as
    much, and so on.

    If only the diagonal of a Gram is known, columns cannot compensate for each other,
    and this method is the same as [`eqquant.ScaleSearch`][].

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        model = eqquant.tree_quantize(model, "int4", stats=stats, method=eqquant.GPTQ())
        ```

    ??? cite "Reference"

        GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
        Transformers. Frantar et al., 2023.

        QuIP: 2-Bit Quantization of Large Language Models With Guarantees. Chee et al.,
        2023. Section 3.2. (LDLQ: the same codes, from one factorisation.)
    """

    damping: float = eqx.field(default=0.01, static=True)
    order: Literal["groups", "act", "none"] = eqx.field(default="groups", static=True)
    tries: int | None = eqx.field(default=None, static=True)
    passes: int = eqx.field(default=3, static=True)
    needs_gram: ClassVar[bool] = True
    takes_tiles: ClassVar[bool] = True

    def __check_init__(self):
        if self.order not in ("groups", "act", "none"):
            raise ValueError(
                f"`order` should be 'groups', 'act' or 'none'. Got {self.order!r}."
            )
        check_number("damping", self.damping)
        check_number("passes", self.passes, whole=True)
        if self.tries is not None:
            check_number("tries", self.tries, whole=True)
        if self.damping < 0:
            raise ValueError(f"`damping` should not be negative. Got {self.damping}.")
        if self.tries is not None and self.tries < 1:
            raise ValueError(f"`tries` should be at least 1. Got {self.tries}.")
        if self.passes < 0:
            raise ValueError(f"`passes` should not be negative. Got {self.passes}.")

    def choose(self, w, format, gram, rows, parameters):
        if gram is None or gram.ndim == 1:
            search = ScaleSearch(self.damping)
            return search.choose(w, format, gram, rows, parameters)
        rounding = Rounding(format)
        # `swept` processes several columns at once, a divisor of the block's size.
        wide = w.shape[-1] > 128
        blocks = in_blocks(w, format, 64 if wide else 1)
        _, number, size = blocks.shape
        fixed = parameters is not None
        if parameters is None and self.order == "act":
            search = ScaleSearch(self.damping)
            _, parameters = search.choose(w, format, gram, rows, None)
        gram = filled(damped(normalised(gram), rows, self.damping), number * size)
        if parameters is None:
            grouped = self.order == "groups"
            tries = self.tries or (32 if format.grid.levels <= 4 else 8)
            codes, parameters = ldlq(rounding, blocks, gram, tries, grouped)
        else:
            codes = ldlq_given(rounding, blocks, gram, parameters)
        return descended(rounding, blocks, gram, codes, parameters, self.passes, fixed)

    def choose_tiles(self, w, format, nearest_tile, gram, rows):
        # If only the diagonal is known, columns cannot compensate for each other.
        gram = jnp.ones_like(w[0]) if gram is None else gram
        gram = jnp.diag(gram) if gram.ndim == 1 else gram
        gram = normalised(gram)
        by = damped(gram, rows, self.damping)
        tiles = rounded_tiles(format, nearest_tile, w, by)
        return refitted_rows(format, w, gram, tiles)

    def losses(self, error, gram):
        return squared_losses(error, gram)
