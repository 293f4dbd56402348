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

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:  # what follows in `_PLACE_OF`, for those who read types
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

_PLACE_OF = {
    "AlexNet": "alexnet",
    "Decoder": "decoder",
    "DecoderConfig": "decoder_config",
    "ExpertsConfig": "decoder_config",
    "Encoder": "encoder",
    "EncoderConfig": "encoder",
    "GPT": "gpt",
    "from_hugging_face": "hugging_face",
    "Llama": "llama",
    "MLP": "mlp",
    "Mixtral": "moe",
}


def __getattr__(name: str) -> _Any:
    """Import a model, or a module, when it is first used: Flax takes seconds, and what is said of
    folders (`folders.py`) does not need it."""
    place = _PLACE_OF.get(name, name)
    if name.startswith("_") or _find_spec(f"{__name__}.{place}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f"{__name__}.{place}")
    value = getattr(module, name) if name in _PLACE_OF else module
    globals()[name] = value
    return value
