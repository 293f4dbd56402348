"""Models in plain Flax. Nothing here knows of zeroxla; import them as `zeroxla.models`.

`Decoder` is one language model whose config has switches for what architectures differ in; `Llama`
and `Mixtral` are made of it. `Encoder` is a BERT. `from_hugging_face` builds public models of many
families. Each model has documented shapes and its own method
`loss(batch, *, train) -> (scalar, metrics)`; most have presets (`GPT.tiny()`, `Llama.small()`,
...). All have one dtype policy. Matrix products run in the dtype of the parameters, so bfloat16
parameters give bfloat16 activations. Statistics of norms, softmax, logits and losses are float32.
"""

if __name__ != "zeroxla.models":  # otherwise each class would exist twice
    raise ImportError(f"{__name__!r} is a part of zeroxla; import it as zeroxla.models")

from .alexnet import AlexNet
from .decoder import Decoder
from .decoder_config import DecoderConfig, ExpertsConfig
from .encoder import Encoder, EncoderConfig
from .gpt import GPT
from .hugging_face import from_hugging_face
from .llama import Llama
from .mlp import MLP
from .moe import Mixtral

__all__ = [
    "GPT",
    "MLP",
    "AlexNet",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "ExpertsConfig",
    "Llama",
    "Mixtral",
    "from_hugging_face",
]
