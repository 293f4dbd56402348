"""A ChatGLM of the size of the recorded GLM: its config, as its authors write one."""

CONFIG = {
    **{"model_type": "chatglm", "num_layers": 2, "padded_vocab_size": 64, "hidden_size": 32},
    **{"num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2},
    **{"ffn_hidden_size": 48, "kv_channels": 8, "layernorm_epsilon": 1.5625e-07},
    **{"add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "seq_length": 64},
}
