import equinox as eqx

from ._base import AbstractFormat
from ._int8 import Int8
from ._names import as_format
from ._nf4 import NF4
from ._scale import from_bits, to_bits


class Nested(AbstractFormat):
    """Double quantization: the scales of one format are stored in another.

    The scales of a row are cut into blocks of their own, so this pays where a row has
    many of them: of 4096 numbers and more, say.

    ??? cite "Reference"

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023. Section 3.
    """

    base: AbstractFormat = eqx.field(default=NF4(64), static=True, converter=as_format)
    scale: AbstractFormat = eqx.field(
        default=Int8(256), static=True, converter=as_format
    )

    def __check_init__(self):
        if isinstance(self.base, Nested):
            raise ValueError(f"`base` should not be nested itself. Got {self.base}.")
        if self.base.block_size is None:
            raise ValueError(
                "`base` should have a block size: with one scale for each channel "
                f"there are no scales to quantize. Got {self.base}."
            )

    @property
    def block_size(self) -> int | None:
        return self.base.block_size

    @property
    def bits(self) -> float:
        return self.base.bits

    def encode(self, w, scale=None):
        if scale is None:
            bits = self.base.encode(w)["scale"]
            scale = from_bits(bits, self.base.scale_dtype)
        number = scale.shape[-1]
        stored_scale = self.scale.encode(scale)
        # The codes belong to the scale as it will be read.
        tail = self.scale.shape(stored_scale, 0)[-1] - number
        scale = self.scale.decode(stored_scale, tail)
        return self.base.encode(w, scale) | {"scale": stored_scale}

    def decode(self, stored, tail):
        number = -(-self.shape(stored, tail)[-1] // self.block_size)
        scale_tail = self.scale.shape(stored["scale"], 0)[-1] - number
        scale = self.scale.decode(stored["scale"], scale_tail)
        bits = to_bits(scale, self.base.scale_dtype)
        return self.base.decode(stored | {"scale": bits}, tail)

    def shape(self, stored, tail):
        return self.base.shape(stored, tail)
