import dataclasses
from typing import Any, ClassVar

import equinox as eqx

from ._adjustable import AbstractAdjustable, Parameters
from ._base import AbstractComposite, AbstractFormat, AbstractScaled
from ._int8 import Int8
from ._names import as_format
from ._nf4 import NF4
from ._scale import to_bits


def _with_scales(format: AbstractFormat | str) -> AbstractScaled:
    format = as_format(format)
    if not isinstance(format, AbstractScaled) or isinstance(format, AbstractComposite):
        raise ValueError(
            "`base` and `scale` should be formats with scales that are not nested "
            f"themselves. Got {format}."
        )
    return format


class Nested(AbstractComposite, AbstractAdjustable):
    """Double quantization: the scales of one format, `base`, are stored in another.

    - `base`: the format of the numbers. It needs a block size.
    - `scale`: the format of its scales. Their blocks stay within a row, too, so double
        quantization saves memory only in rows of about 4096 numbers or more.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Nested(eqquant.Int4(32)))
        ```

    ??? cite "Reference"

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023. Section 3.
    """

    joint: ClassVar[bool] = True
    base: AbstractScaled = eqx.field(
        default=NF4(64), static=True, converter=_with_scales
    )
    scale: AbstractScaled = eqx.field(
        default=Int8(256), static=True, converter=_with_scales
    )

    def __check_init__(self):
        if self.base.block_size is None:
            raise ValueError(
                "`base` should have a block size: with one scale for each channel "
                f"there are no blocks of scales. Got {self.base}."
            )

    @property
    def block_size(self) -> int | None:
        return self.base.block_size

    @property
    def splits(self) -> bool:
        return self.base.splits and self.scale.splits

    def prepacked(self, platform):
        return dataclasses.replace(self, base=self.base.prepacked(platform))

    def encode(self, w, scale=None):
        if scale is None:
            scale = self.base.scales(self.base.encode(w), 0)
        stored = self.scale.encode(scale)
        # The codes are chosen for the decoded scales.
        scale = self.scale.decode(stored, self._tail(stored, scale.shape[-1]))
        return self.base.encode(w, scale) | {"scale": stored}

    @property
    def grid(self) -> Any:
        # (A base without adjustable blocks is not a grid either, and methods refuse
        # it.)
        return self.base

    def candidates(self, blocks, size):
        return self._adjustable.candidates(blocks, size)

    def held(self, parameters):
        return self._adjustable.held(parameters)

    def settled(self, parameters):
        scale, offset = self.held(parameters)
        stored = self.scale.encode(scale)
        read = self.scale.decode(stored, self._tail(stored, scale.shape[-1]))
        settled, read = self._adjustable.settled(Parameters(read, offset))
        return settled | {"scale": stored}, read

    def write(self, codes, settled):
        return self._adjustable.write(codes, settled)

    @property
    def _adjustable(self) -> AbstractAdjustable:
        if not isinstance(self.base, AbstractAdjustable):
            raise ValueError(f"`base` has no scales to choose. Got {self.base}.")
        return self.base

    def flat(self, stored, tail):
        return stored | {"scale": to_bits(self.scales(stored, tail), self.scale_dtype)}

    def scales(self, stored, tail):
        k = self.shape(stored, tail)[-1]
        blocks = -(-k // (self.block_size or k))
        return self.scale.decode(stored["scale"], self._tail(stored["scale"], blocks))

    def _tail(self, stored, blocks):
        return self.scale.shape(stored, 0)[-1] - blocks
