"""Logits that transformers computes of the models in `families.py`, in float32:
`python -m tests.interop.by_transformers` writes `tests/data/transformers.npz`, with the
packages `torch` and `transformers`. (It imports no JAX.)"""

import json
import pathlib
import tempfile

import numpy as np

from . import families


def main():
    import safetensors.numpy
    import torch
    import transformers

    found = {}
    here = pathlib.Path(__file__).parent
    for family in families.families:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "config.json").write_text(json.dumps(families.config(family)))
            arrays = families.arrays(family)
            safetensors.numpy.save_file(
                arrays, folder / "model.safetensors", {"format": "pt"}
            )
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
        assert not any(info.values()), info
        with torch.inference_mode():
            inputs = torch.tensor(families.tokens[None].astype(np.int64))
            found[family] = model.eval()(inputs).logits[0].numpy()
        print(family, found[family].std())
    np.savez_compressed(here.parent / "data" / "transformers.npz", **found)


if __name__ == "__main__":
    main()
