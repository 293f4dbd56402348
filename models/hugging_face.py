"""`from_hugging_face` builds the model that a Hugging Face config.json describes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from .format import read_config
from .gpt import GPT
from .llama import Llama

CLASSES = {cls.hugging_face.model_type: cls for cls in (GPT, Llama)}


def from_hugging_face(
    source: str | Path | Mapping[str, Any], **overrides: Any
) -> "GPT | Callable[[nnx.Rngs], Llama]":
    """Build the model that a config describes.

    Args:
      source: a folder with a `config.json`, the file itself, or its contents as a mapping.
      **overrides: fields that configs do not decide: `scan`, `remat`, and GPT's `dropout`. Dropout
        acts in training only; it is 0 if not given, whatever the config says.

    Returns:
      `GPT(...)`, or `lambda rngs: Llama(...)`, which allocates nothing.

    Raises:
      ValueError: there is no config, it is damaged, it describes another kind of model or
        something that the model does not compute, or an override contradicts it.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 2}, remat=True).layers
    2
    """
    config = source if isinstance(source, Mapping) else read_config(source)
    kind = config.get("model_type")
    if kind not in CLASSES:
        raise ValueError(
            f"the config's model_type is {kind!r}; there is a model for "
            + " and ".join(map(repr, CLASSES))
        )
    cls = CLASSES[kind]
    arguments = cls.hugging_face.arguments(config)
    clash = [
        f"{name}={value!r} (the config says {arguments[name]!r})"
        for name, value in overrides.items()
        if name in arguments and value != arguments[name]
    ]
    if clash:
        raise ValueError(f"{', '.join(clash)} would not fit the weights; change the config instead")
    if cls is GPT:
        return GPT(**{**arguments, **overrides})

    def build(rngs: nnx.Rngs) -> Llama:
        return Llama(**{**arguments, **overrides}, rngs=rngs)

    # Fail here rather than later. It also checks fields that follow from others, as head_dim does.
    differences = Llama.hugging_face.differences(config, nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    if differences:
        raise ValueError(f"the config cannot be followed: {'; '.join(differences)}")
    return build
