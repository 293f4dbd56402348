"""A Hugging Face folder of a small chat model: weights, a tokenizer of bytes, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import optax

import zeroxla
from zeroxla.models import from_hugging_face

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, whose tokens 256 to 258 are `SPECIAL`, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(_characters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_chat_folder(
    folder: Path, *, layers: int = 2, width: int = 32, heads: int = 4, length: int = 128
) -> Path:
    """Write a Qwen3 with random weights, its tokenizer and its template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 256 + len(SPECIAL) + 1,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 258,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    model = from_hugging_face(folder)
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=1, devices=jax.devices()[:1])
    step = zeroxla.make_step(model, mesh, optax.sgd(0.0))
    state = step.init(jax.random.key(0), {"tokens": np.zeros((1, 9), np.int32)})
    zeroxla.export_params(state, folder, model=model, config=config)
    return folder


def write_conversations(file: Path, count: int = 40) -> Path:
    """Write conversations about capitals, of which the first one is asked in tests."""
    facts = [("France", "Paris"), ("Italy", "Rome"), ("Peru", "Lima"), ("Japan", "Tokyo")]
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Capital of {country}?"},
                {"role": "assistant", "content": f"{capital}."},
            ]
        }
        for country, capital in facts
    ]
    text = "".join(json.dumps(lines[i % len(lines)]) + "\n" for i in range(count))
    file.write_text(text)
    return file


def _characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
