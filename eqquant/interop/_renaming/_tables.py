# Maps names of arrays in llama.cpp to names in Hugging Face transformers. Other names
# are unchanged.
llama: dict[str, str | None] = {
    "token_embd.*": "model.embed_tokens.*",
    "output_norm.*": "model.norm.*",
    "output.*": "lm_head.*",
    # Transformers computes these from the configuration.
    "rope_freqs.*": None,
    "blk.*.attn_norm.*": "model.layers.*.input_layernorm.*",
    "blk.*.attn_q.*": "model.layers.*.self_attn.q_proj.*",
    "blk.*.attn_k.*": "model.layers.*.self_attn.k_proj.*",
    "blk.*.attn_v.*": "model.layers.*.self_attn.v_proj.*",
    "blk.*.attn_output.*": "model.layers.*.self_attn.o_proj.*",
    "blk.*.attn_q_norm.*": "model.layers.*.self_attn.q_norm.*",
    "blk.*.attn_k_norm.*": "model.layers.*.self_attn.k_norm.*",
    "blk.*.ffn_norm.*": "model.layers.*.post_attention_layernorm.*",
    "blk.*.ffn_gate.*": "model.layers.*.mlp.gate_proj.*",
    "blk.*.ffn_up.*": "model.layers.*.mlp.up_proj.*",
    "blk.*.ffn_down.*": "model.layers.*.mlp.down_proj.*",
    "blk.*.ffn_gate_inp.*": "model.layers.*.mlp.gate.*",
    "blk.*.ffn_gate_exps.*": "model.layers.*.mlp.experts.gate_proj.*",
    "blk.*.ffn_up_exps.*": "model.layers.*.mlp.experts.up_proj.*",
    "blk.*.ffn_down_exps.*": "model.layers.*.mlp.experts.down_proj.*",
}

# Models of the same family have the same names.
tables: dict[str, dict[str, str | None]] = {
    "llama": llama,
    "mistral": llama,
    "qwen": llama,
}

# Map Hugging Face's names to llama.cpp's.
inverse_tables: dict[str, dict[str, str | None]] = {
    key: {new: old for old, new in table.items() if new is not None}
    for key, table in tables.items()
}
