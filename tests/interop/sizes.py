from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Those of a small language model."""

    hidden: int
    wide: int
    depth: int
    heads: int
    few: int
    head: int
    vocabulary: int

    def config(self) -> dict[str, Any]:
        """By their names in Hugging Face's `config.json`."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.wide,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.few,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-5,
        }
