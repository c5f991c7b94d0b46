from ._decode import Decoding as Decoding, measure_decoding as measure_decoding
from ._decoder import Size as Size
from ._figure import figure as figure
from ._formats import (
    as_quantization as as_quantization,
    default_formats as default_formats,
    Quantization as Quantization,
)
from ._measure import measure as measure
from ._measurement import Measurement as Measurement
from ._run import run as run
from ._times import Times as Times
