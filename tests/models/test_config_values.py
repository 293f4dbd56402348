"""A Hugging Face config with a value of the wrong type: the error names the key and the value."""

import pytest

from zeroxla.models import from_hugging_face


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0; it must be a whole number above 0"),
        ({"hidden_size": "64"}, "hidden_size='64'; it must be a whole number above 0"),
        ({"hidden_size": 64.0}, "hidden_size=64.0; it must be a whole number"),
        ({"num_key_value_heads": -1}, "num_key_value_heads=-1; it must be"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; it must be a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1; it must be true or false"),
        ({"vocab_size": True}, "vocab_size=True; it must be a whole number"),
    ],
)
def test_a_value_of_another_kind_is_named(config, message):
    with pytest.raises(ValueError, match=f"the config has {message}"):
        from_hugging_face({"model_type": "llama", **config})


def test_a_value_of_gpt_is_checked_too():
    with pytest.raises(ValueError, match="the config has n_head=0; it must be a whole number"):
        from_hugging_face({"model_type": "gpt2", "n_head": 0})
    assert from_hugging_face({"model_type": "gpt2", "n_inner": None}).hidden == 4 * 768
