"""The names of the arrays of a layer in llama.cpp, by those of Hugging Face."""

matrices = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
