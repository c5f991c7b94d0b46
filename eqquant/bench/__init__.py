"""`eqquant bench`: measures the speed and the memory of products and of whole models,
next to float32 and to other libraries.

Products of other libraries are in `_peers`, whole models in `_generation`, products on
GPUs in `_gpu`, and measurements for developers of kernels in `_costs`.

May import every room but `_cli`, and rich and matplotlib.
"""

from ._clock import Times as Times
from ._conversion import (
    Conversion as Conversion,
    measure_conversions as measure_conversions,
    run_conversions as run_conversions,
)
from ._decode import Decoding as Decoding, measure_decoding as measure_decoding
from ._decoder import Size as Size
from ._figure import figure as figure
from ._formats import (
    all_formats as all_formats,
    as_quantization as as_quantization,
    default_formats as default_formats,
    Quantization as Quantization,
)
from ._generation import (
    Generation as Generation,
    measure_generation as measure_generation,
    run_generation as run_generation,
)
from ._gpu import (
    default_cases as default_cases,
    gpu_formats as gpu_formats,
    gpu_table as gpu_table,
    GPUMeasurement as GPUMeasurement,
    measure_gpu as measure_gpu,
    read_gpu as read_gpu,
    run_gpu as run_gpu,
)
from ._measure import measure as measure
from ._measurement import Measurement as Measurement
from ._memory import (
    measure_memory as measure_memory,
    Memory as Memory,
    run_memory as run_memory,
)
from ._run import run as run
