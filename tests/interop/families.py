"""Small models of Llama, Qwen 2, Qwen 3 and Qwen 3 with experts, as folders of Hugging
Face have them, whose numbers anybody can draw again. (By numpy alone.)"""

from typing import Any

import numpy as np

from .sizes import Sizes


families = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
sizes = Sizes(64, 128, 2, 4, 2, 16, 96)
hidden, wide, depth, heads, few, head, vocabulary = sizes
experts, chosen, narrow = 4, 2, 32


def config(family: str, **changes: Any) -> dict[str, Any]:
    found = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Qwen3Moe": "qwen3_moe"}.get(family, family.lower()),
        **sizes.config(),
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": family == "Qwen3",
    }
    if family == "Qwen3Moe":
        found |= {
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": narrow,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return found | changes


def arrays(family: str) -> dict[str, np.ndarray]:
    """By their names in Hugging Face."""
    rng = np.random.default_rng(families.index(family))

    def matrix(n, k):
        return rng.standard_normal((n, k), np.float32) * np.float32(1.5 * k**-0.5)

    def vector(n):
        return 1 + 0.2 * rng.standard_normal(n, np.float32)

    def mlp(name, size):
        return {
            f"{name}.gate_proj.weight": matrix(size, hidden),
            f"{name}.up_proj.weight": matrix(size, hidden),
            f"{name}.down_proj.weight": matrix(hidden, size),
        }

    found = {"model.embed_tokens.weight": matrix(vocabulary, hidden)}
    for i in range(depth):
        name = f"model.layers.{i}"
        found[f"{name}.input_layernorm.weight"] = vector(hidden)
        found[f"{name}.post_attention_layernorm.weight"] = vector(hidden)
        for x, n in (("q", heads), ("k", few), ("v", few)):
            found[f"{name}.self_attn.{x}_proj.weight"] = matrix(n * head, hidden)
            if family == "Qwen2":
                found[f"{name}.self_attn.{x}_proj.bias"] = vector(n * head)
        found[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, heads * head)
        if family.startswith("Qwen3"):
            found[f"{name}.self_attn.q_norm.weight"] = vector(head)
            found[f"{name}.self_attn.k_norm.weight"] = vector(head)
        if family == "Qwen3Moe":
            found[f"{name}.mlp.gate.weight"] = matrix(experts, hidden)
            for e in range(experts):
                found |= mlp(f"{name}.mlp.experts.{e}", narrow)
        else:
            found |= mlp(f"{name}.mlp", wide)
    found["model.norm.weight"] = vector(hidden)
    if family != "Qwen3":
        found["lm_head.weight"] = matrix(vocabulary, hidden)
    return found


tokens = np.random.default_rng(9).integers(0, vocabulary, 24).astype(np.int32)
