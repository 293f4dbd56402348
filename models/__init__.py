"""Models in plain Flax: nothing here knows of zeroxla.

Each has presets (`GPT.tiny()`, `Llama.small()`, ...), documented shapes, and its own method
`loss(batch, *, train) -> (scalar, metrics)`. Dtype policy of all four: matrix products run in the
dtype of the parameters (bfloat16 parameters give bfloat16 activations); statistics of norms,
softmax, logits and losses are float32.
"""

from models.alexnet import AlexNet
from models.gpt import GPT
from models.hugging_face import from_hugging_face
from models.llama import Llama
from models.mlp import MLP

__all__ = ["GPT", "MLP", "AlexNet", "Llama", "from_hugging_face"]
