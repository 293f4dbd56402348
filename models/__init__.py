"""Models in plain Flax: nothing here knows of zeroxla. They are imported as `zeroxla.models`.

Each has presets (`GPT.tiny()`, `Llama.small()`, ...), documented shapes, and its own method
`loss(batch, *, train) -> (scalar, metrics)`. Dtype policy of all four: matrix products run in the
dtype of the parameters (bfloat16 parameters give bfloat16 activations); statistics of norms,
softmax, logits and losses are float32.
"""

if __name__ != "zeroxla.models":  # a second copy of each class would be no instance of the first
    raise ImportError(f"{__name__!r} is a part of zeroxla; import it as zeroxla.models")

from .alexnet import AlexNet
from .gpt import GPT
from .hugging_face import from_hugging_face
from .llama import Llama
from .mlp import MLP

__all__ = ["GPT", "MLP", "AlexNet", "Llama", "from_hugging_face"]
