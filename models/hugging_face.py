"""`from_hugging_face` builds the model that a Hugging Face config.json describes."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flax import nnx

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .encoder import Encoder, EncoderConfig
from .families import FAMILIES
from .format import Format, read_config
from .gpt import GPT
from .llama import Llama

Model = TypeVar("Model", Decoder, Encoder)

FORMATS: dict[str, Format] = {
    **{cls.hugging_face.model_type: cls.hugging_face for cls in (GPT, Llama, Encoder)},
    **FAMILIES,
}
"""The formats of the models that are built from a config, by its `model_type`."""


def from_hugging_face(
    source: str | Path | Mapping[str, Any], **overrides: Any
) -> "GPT | Callable[[nnx.Rngs], Decoder | Encoder]":
    """Build the model that a config describes.

    Args:
      source: a folder with a `config.json`, the file itself, or its contents as a mapping.
      **overrides: what configs do not decide: `scan`, `remat`, `attention`, `attention_block`,
        `loss_chunk`; GPT's `dropout`, which acts in training only and is 0 if not given, whatever
        the config says; for models with experts `routing`, `capacity_factor` and `balance`. Experts
        drop no token if not told otherwise (`routing="ragged"`).

    Returns:
      `GPT(...)`, or `lambda rngs: Llama(...)`, for BERT `lambda rngs: Encoder(...)`, for other
      families `lambda rngs: Decoder(...)`. The functions allocate nothing.

    Raises:
      ValueError: there is no config, it is damaged, it describes another kind of model or
        something that the model does not compute, or an override contradicts it.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 2}, remat=True).layers
    2
    """
    config = source if isinstance(source, Mapping) else read_config(source)
    kind = config.get("model_type")
    if kind not in FORMATS:
        raise ValueError(
            f"the config's model_type is {kind!r}; there is a model for "
            + ", ".join(map(repr, FORMATS))
            + ". A family is added as data (docs/architecture.md, where to add things). A Flax "
            "model of your own needs none of it: zeroxla.make_step trains it as it is"
        )
    arguments = FORMATS[kind].arguments(config)
    if kind in FAMILIES:
        return _decoder(arguments["config"], overrides)
    if kind == Encoder.hugging_face.model_type:
        return _encoder(EncoderConfig(**arguments, source=json.dumps(config)), overrides)
    clash = [
        f"{name}={value!r} (the config says {arguments[name]!r})"
        for name, value in overrides.items()
        if name in arguments and value != arguments[name]
    ]
    if clash:
        raise ValueError(f"{', '.join(clash)} would not fit the weights; change the config instead")
    if kind == GPT.hugging_face.model_type:
        return GPT(**{**arguments, **overrides})
    return _checked(lambda rngs: Llama(**{**arguments, **overrides}, rngs=rngs))


def _encoder(config: EncoderConfig, overrides: Mapping[str, Any]) -> Callable[[nnx.Rngs], Encoder]:
    return _checked(lambda rngs: Encoder(config, **overrides, rngs=rngs))


def _decoder(config: DecoderConfig, overrides: Mapping[str, Any]) -> Callable[[nnx.Rngs], Decoder]:
    of_experts = {name: overrides[name] for name in OF_EXPERTS if name in overrides}
    rest = {name: value for name, value in overrides.items() if name not in OF_EXPERTS}
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    if clash := sorted(fields & set(rest)):
        raise ValueError(f"{', '.join(clash)} would not fit the weights; change the config instead")
    if of_experts:
        if config.experts is None:
            raise ValueError(
                f"{', '.join(of_experts)}: the model has no experts; leave these arguments out"
            )
        config = config.replaced(experts=dataclasses.replace(config.experts, **of_experts))
    return _checked(lambda rngs: Decoder(config, **rest, rngs=rngs))


OF_EXPERTS = ("routing", "capacity_factor", "balance")
"""Arguments for models with experts."""


def _checked(build: Callable[[nnx.Rngs], Model]) -> Callable[[nnx.Rngs], Model]:
    """Return the function that builds a model, tried once, without arrays, so that it fails here
    rather than later."""
    nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return build
