"""Small models of all families from files into those of eqx-zoo: `python -m
tests.eqx_zoo.run FOLDER` prints, as JSON, by how much logits differ at most: of float32
from those that transformers computes, and of quantized files from those of the same
weights dequantized."""

import json
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqx_zoo import CausalLM
from eqx_zoo.models.causal_lm.config import Config

import eqquant as eqq
from eqquant import formats, interop

from ..interop import families


# The experts of a layer are one array in eqx-zoo. All other names are the same.
experts = "model.layers.{i}.mlp.experts"
rename = {f"{experts}.{{e}}.{{x}}.weight": f"{experts}.{{x}}.weight"}
layouts = {
    "gguf": (formats.Q8_0(), formats.Q4_0(), formats.Q5_1()),
    "mlx": (eqq.Int(4, 32, "minimum"), eqq.MXFP4()),
    "compressed-tensors": (eqq.Int4(32), eqq.Int8(), eqq.NVFP4(inverse=True)),
    "gptq": (eqq.Int4(32, symmetric=False, scale_dtype=jnp.float16),),
    "bitsandbytes": (eqq.NF4(32), eqq.Nested(eqq.NF4(32), formats.BnbScale(64))),
}


def main(folder):
    found = {}
    stored = np.load(pathlib.Path(__file__).parents[1] / "data" / "transformers.npz")
    for family in families.families:
        arrays = families.arrays(family)
        config = Config.from_hf(families.config(family))
        skeleton = eqx.filter_eval_shape(CausalLM, config, key=jax.random.key(0))
        path = folder / f"{family}.safetensors"
        interop.write(path, arrays, "bitsandbytes")
        model = interop.load_into(skeleton, interop.open(path), rename)
        found[family] = _difference(_logits(model), stored[family])
        for layout, kinds in layouts.items():
            for format in kinds:
                each = _quantized(skeleton, arrays, layout, format, folder / family)
                found[f"{family}, {layout}, {format}"] = _difference(*each)
    print(json.dumps(found))


def _quantized(skeleton, arrays, layout, format, path):
    packed = {
        name: eqq.quantize(jnp.asarray(w), format, axis=-1)
        if name.endswith("_proj.weight")
        else jnp.asarray(w)
        for name, w in arrays.items()
    }
    rules = [rename]
    if layout == "gguf":
        path = path.with_suffix(".gguf")
        architecture = "llama" if "Llama" in path.name else "qwen"
        metadata = {
            "general.architecture": architecture,
            f"{architecture}.attention.head_count": families.heads,
            f"{architecture}.attention.head_count_kv": families.few,
        }
        interop.write_gguf(path, packed, metadata, rename="llama")
        rules = ["llama", rename]
    else:
        path = path.with_suffix(f".{layout}.safetensors")
        interop.write(path, packed, layout)
    model = interop.load_into(skeleton, interop.open(path), rules)
    assert eqq.is_quantized(model.model.layers[0].self_attn.q_proj.weight)
    dense = interop.load_into(skeleton, eqq.tree_dequantize(packed), rename)
    return _logits(model), _logits(dense)


@eqx.filter_jit
def _logits(model):
    return eqq.implicit(lambda model, x: model(x)[0])(
        model, jnp.asarray(families.tokens)
    )


def _difference(x, y):
    return float(np.max(np.abs(np.asarray(x) - np.asarray(y))))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
