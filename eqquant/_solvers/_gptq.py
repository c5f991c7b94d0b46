from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp

from ._descent import descended
from ._gram import damped, filled, normalised
from ._ldlq import ldlq, ldlq_given
from ._method import AbstractMethod, squared_losses
from ._rounding import in_blocks, Rounding
from ._scale_search import ScaleSearch
from ._tiles import refitted_rows, rounded_tiles


class GPTQ(AbstractMethod):
    """Rounds one column after another, such that those to come make up for the errors
    of those before; finds the scale of each block on the way; and improves all codes
    and scales by coordinate descent. What is minimised is the squared error of the
    products with the inputs that the Gram matrix is a sum over.

    - `damping`: what is added to the diagonal of the Gram, in units of its mean.
    - `order`: `"groups"` begins with the block of the largest inputs, and with the
      largest of a block. `"act"` goes by the size of inputs alone, with scales that are
      found before. `"none"` goes from the first to the last. This is the order of the
      computation; what is stored is in the order of the weight.
    - `tries`: how many of the most promising scales of each block are tried to the end.
        By default 8, and 32 in formats of at most four levels, which gain by it.
    - `passes`: how many times coordinate descent goes over all columns.

    Where numbers are chosen together, as those of the tiles of [`eqquant.Trellis`][],
    one tile is rounded after another, from the last of a row to the first, and within a
    tile, each of the paths among which the format chooses makes up for errors of its
    own. The scale of each row is found in the end, by least squares. There, `order`,
    `tries` and `passes` do not matter.

    All is computed in float32. A Gram that is singular then, so that it has no Cholesky
    factor, gets more damping: 1e-6 of the mean diagonal, or ten times as much, and so
    on.

    If only the diagonal of a Gram is known, errors cannot make up for others, and this
    is [`eqquant.ScaleSearch`][].

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
        # (`swept` takes many columns at once, a number of them that divides a block.)
        wide = w.shape[-1] > 128
        blocks = in_blocks(w, format, 64 if wide else 1)
        _, number, size = blocks.shape
        fixed = parameters is not None
        if parameters is None and self.order == "act":
            search = ScaleSearch(self.damping)
            _, parameters = search.choose(w, format, gram, rows, None)
        gram = filled(damped(normalised(gram), self.damping, rows), number * size)
        if parameters is None:
            grouped = self.order == "groups"
            tries = self.tries or (32 if format.grid.levels <= 4 else 8)
            codes, parameters = ldlq(rounding, blocks, gram, tries, grouped)
        else:
            codes = ldlq_given(rounding, blocks, gram, parameters)
        return descended(rounding, blocks, gram, codes, parameters, self.passes, fixed)

    def choose_tiles(self, w, format, nearest_tile, gram, rows):
        # (Errors cannot make up for others if only the diagonal is known.)
        gram = jnp.ones_like(w[0]) if gram is None else gram
        gram = jnp.diag(gram) if gram.ndim == 1 else gram
        gram = normalised(gram)
        by = damped(gram, self.damping, rows)
        tiles = rounded_tiles(format, nearest_tile, w, by)
        return refitted_rows(format, w, gram, tiles)

    def losses(self, error, gram):
        return squared_losses(error, gram)
