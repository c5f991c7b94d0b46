"""What is written for llama.cpp, and read back by the gguf package."""

import gguf
import numpy as np

from eqquant import interop


def written(folder, **options):
    path = folder.with_suffix(".gguf")
    with interop.open(folder) as checkpoint:
        interop.write_gguf(path, checkpoint, **{"config": folder} | options)
    return path


def fields_of(path):
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return {k: x for k, x in fields.items() if not k.startswith("GGUF.")}


def tensors_of(path):
    return {
        tensor.name: (tensor.tensor_type.name, np.array(tensor.data))
        for tensor in gguf.GGUFReader(path).tensors
    }


llama3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
