import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Architecture(NamedTuple):
    """The changes that llama.cpp's converter makes to the arrays of an architecture.

    - `interleaved`: the arrays of queries and keys, `"weight"` or `"bias"`, in which
      the two halves of each head, between which RoPE rotates, are interleaved. (In the
      original models, one half follows the other.)
    - `is_shifted`: whether one is added to the weights of norms.
    """

    interleaved: tuple[str, ...] = ()
    is_shifted: bool = False


_both = Architecture(("weight", "bias"))
_weights = Architecture(("weight",))
_shifted = Architecture(is_shifted=True)
_plain = Architecture()

# By the name in `general.architecture`. The arrays of other architectures are used as
# in the file.
architectures: dict[str, Architecture] = {
    **dict.fromkeys(
        """arcee deci deepseek eagle3 granite granite_swa granitehybrid granitemoe llada
        llama llama-embed mistral3 nanbeige smollm3""".split(),
        _both,
    ),
    **dict.fromkeys(
        "arctic baichuan bailingmoe internlm2 minicpm olmo xverse".split(), _weights
    ),
    **dict.fromkeys(
        """gemma gemma-embedding gemma2 gemma3 minimax-m3 nemotron qwen35 qwen35moe
        qwen3next step35""".split(),
        _shifted,
    ),
    **dict.fromkeys(
        """afmoe apertus cohere2 cohere2moe command-r deepseek2 dots1 dream ernie4_5
        ernie4_5-moe exaone exaone-moe exaone4 gemma3n gemma4 glm4moe gpt-oss grovemoe
        hunyuan-dense hunyuan-moe jais2 laguna lfm2 lfm2moe llada-moe llama4 maincoder
        mellum mimo2 minicpm3 minimax-m2 mistral4 olmo2 olmoe orion pangu-embedded phi2
        phi3 phimoe plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe
        rnd1 seed_oss smallthinker stablelm starcoder2""".split(),
        _plain,
    ),
}

_rotated = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[qk])\.(?P<kind>\w+)")
# The norms of linear attention are not shifted.
_norm = re.compile(r".*(?<!ssm_)norm\.weight")


def _of(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    return architectures.get(name, _plain) if isinstance(name, str) else _plain


def heads_of(name: str, metadata: Mapping[str, Any]) -> int | None:
    """Returns the number of heads of an array whose rows are interleaved, or `None`."""
    found = _rotated.fullmatch(name)
    if found is None or found["kind"] not in _of(metadata).interleaved:
        return None
    key = f"{metadata['general.architecture']}.attention.head_count"
    count = metadata.get(key)
    if found["which"] == "k":
        # By default, keys have as many heads as queries.
        count = metadata.get(f"{key}_kv", count)
    layer = int(found["layer"])
    if isinstance(count, list) and layer < len(count):
        count = count[layer]
    if type(count) is not int or count < 1:
        raise ValueError(
            f"{name!r} has permuted rows. To restore their order takes the number of "
            f"heads, in the metadata {key!r}. Got {count!r}."
        )
    return count


def is_shifted(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether an array is the weight of a norm to which the converter adds one."""
    return _of(metadata).is_shifted and _norm.fullmatch(name) is not None


def check_architecture(metadata: Mapping[str, Any], instead: str) -> None:
    """Raises a `ValueError` if the architecture is not known, or if the file is an
    adapter, so that arrays cannot be converted to Hugging Face's or back. `instead`
    suggests what to do."""
    if metadata.get("general.type") == "adapter":
        raise ValueError(
            "It is an adapter, whose rows for queries and keys may be in the order of "
            f"llama.cpp. {instead}"
        )
    name = metadata.get("general.architecture")
    if name is not None and name not in architectures:
        near = difflib.get_close_matches(str(name), architectures)
        hint = f" (Names that are similar: {', '.join(near)}.)" if near else ""
        raise ValueError(
            f"{name!r} should be an architecture for which this library knows how "
            "llama.cpp orders the rows of queries and keys, and whether it adds one to "
            f"norms. {instead}{hint}"
        )
