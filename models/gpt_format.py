"""GPT-2 in Hugging Face's format: GPT2LMHeadModel. Its Conv1D weights are [in, out]."""

from .format import Format, Key

FORMAT = Format(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    layer="h_{layer}",
    stack="h",
    tensors={
        "wte/embedding": "transformer.wte.weight",
        "wpe/embedding": "transformer.wpe.weight",
        "h_{layer}/ln_1/scale": "transformer.h.{layer}.ln_1.weight",
        "h_{layer}/ln_1/bias": "transformer.h.{layer}.ln_1.bias",
        "h_{layer}/attn/c_attn/kernel": "transformer.h.{layer}.attn.c_attn.weight",
        "h_{layer}/attn/c_attn/bias": "transformer.h.{layer}.attn.c_attn.bias",
        "h_{layer}/attn/c_proj/kernel": "transformer.h.{layer}.attn.c_proj.weight",
        "h_{layer}/attn/c_proj/bias": "transformer.h.{layer}.attn.c_proj.bias",
        "h_{layer}/ln_2/scale": "transformer.h.{layer}.ln_2.weight",
        "h_{layer}/ln_2/bias": "transformer.h.{layer}.ln_2.bias",
        "h_{layer}/mlp/c_fc/kernel": "transformer.h.{layer}.mlp.c_fc.weight",
        "h_{layer}/mlp/c_fc/bias": "transformer.h.{layer}.mlp.c_fc.bias",
        "h_{layer}/mlp/c_proj/kernel": "transformer.h.{layer}.mlp.c_proj.weight",
        "h_{layer}/mlp/c_proj/bias": "transformer.h.{layer}.mlp.c_proj.bias",
        "ln_f/scale": "transformer.ln_f.weight",
        "ln_f/bias": "transformer.ln_f.bias",
        "lm_head": "lm_head.weight",
    },
    prefix="transformer.",
    # Older versions of Transformers saved the causal mask with the weights.
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),
    embedding="wte/embedding",
    head="lm_head",
    fields={
        "vocab": Key(name="vocab_size", default=50257),
        "length": Key(name="n_positions", default=1024),
        "layers": Key(name="n_layer", default=12),
        "width": Key(name="n_embd", default=768),
        "heads": Key(name="n_head", default=12),
        "hidden": Key(name="n_inner", null=lambda fields: 4 * fields["width"]),
        "tie": Key(name="tie_word_embeddings", default=True),
    },
    choices={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    # Dropout rates are written but not read: they are no part of what the weights compute.
    written=lambda model: dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
)
