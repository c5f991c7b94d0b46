"""The speed of products on GPUs, with a check of their results."""

from ._measure import GPUMeasurement as GPUMeasurement, measure_gpu as measure_gpu
from ._run import (
    default_cases as default_cases,
    gpu_formats as gpu_formats,
    gpu_table as gpu_table,
    read_gpu as read_gpu,
    run_gpu as run_gpu,
)
