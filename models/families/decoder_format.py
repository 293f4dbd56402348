"""`DecoderFormat`: a family of models as data, what a config.json and tensors mean to `Decoder`.

A family that a config.json describes is read, and its config is written back as it was read.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..decoder_config import Activation, DecoderConfig
from ..format import Format, Key
from ..rope_config import rope_of_config
from ..rotary import Pairs, Rotary

Fields = Mapping[str, Any]
Build = Callable[[Fields, Fields], dict[str, Any]]
"""(fields, config) -> arguments of a `DecoderConfig`."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Functions by their names in configs; some have several."""

SIZES = {
    "vocab": Key(name="vocab_size"),
    "layers": Key(name="num_hidden_layers"),
    "width": Key(name="hidden_size"),
    "heads": Key(name="num_attention_heads"),
}
HIDDEN = {"hidden": Key(name="intermediate_size")}
LENGTH = {"length": Key(name="max_position_embeddings", default=2048, is_computed=False)}
TIE = {"tie": Key(name="tie_word_embeddings", default=False)}
LAYER_NORM = {"eps": Key(name="layer_norm_epsilon", default=1e-5)}


def grouped(
    *,
    kv_heads: int | None = None,
    head_width: int | None = None,
    eps: float = 1e-6,
    tie: bool = False,
) -> dict[str, Key]:
    """Return the fields of a decoder with grouped heads and RMSNorm.

    Args:
      kv_heads, head_width, eps, tie: the values that Transformers takes if their keys are absent.
        None means as many as heads, and the width of the model over its heads, as null does.
    """
    return {
        **SIZES,
        **HIDDEN,
        "kv_heads": Key(
            name="num_key_value_heads", default=kv_heads, null=lambda fields: fields["heads"]
        ),
        "head_width": Key(
            name="head_dim",
            default=head_width,
            null=lambda fields: fields["width"] // fields["heads"],
        ),
        **LENGTH,
        "tie": Key(name="tie_word_embeddings", default=tie),
        "eps": Key(name="rms_norm_eps", default=eps),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecoderFormat(Format):
    """A family of `Decoder`s.

    Attributes:
      build: returns the arguments of a `DecoderConfig` beyond `fields`, from the fields and the
        config.
      text: returns the config of the language model inside a config of more. It is the one that
        `fields` and `build` read, and that is written.
    """

    build: Build
    text: Callable[[Fields], Fields] = lambda config: config

    def arguments(self, config: Fields) -> dict[str, Any]:
        """Return {"config": the decoder's config}.

        Raises:
          ValueError: the config describes another kind of model, or something that the model does
            not compute.
        """
        return {"config": self.decoder_config(config)}

    def decoder_config(self, config: Fields) -> DecoderConfig:
        """Return the decoder that a config describes; see `arguments`."""
        if problems := self._unknown(config):
            raise ValueError(f"the config cannot be followed: {'; '.join(problems)}")
        config = self.text(config)
        fields = self._resolve(self.fields, config)
        known = {field.name for field in dataclasses.fields(DecoderConfig)}
        more = self.build(fields, config)
        own = {name: value for name, value in fields.items() if name in known}
        source = json.dumps(config, indent=2)
        return DecoderConfig(**{**own, **more, "family": self.model_type, "source": source})

    def differences(self, config: Fields, model: Any) -> list[str]:
        """Return the differences between a config and a model, in words with both values.

        Raises:
          ValueError: as for `arguments`.
        """
        if problems := self._unknown(config):
            return problems
        here, there = _computed(model.config), _computed(self.decoder_config(config))
        return [
            f"{name} is {value!r}, and the model has {here.get(name)!r}"
            for name, value in there.items()
            if here.get(name) != value
        ]

    def config(self, model: Any, *, dtype: str) -> dict[str, Any]:
        """Return the config that the model was built from, with the dtype of the tensors.

        Raises:
          ValueError: the model was not built from one.
        """
        if model.config.source is None:
            raise ValueError(
                f"the model was not built from a config.json of {self.architecture}, so there is "
                "none to write; build it with zeroxla.models.from_hugging_face"
            )
        config = json.loads(model.config.source)
        names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
        return {**config, **dict.fromkeys(names, dtype)}


def _computed(config: DecoderConfig) -> dict[str, Any]:
    """Return what the results depend on: how experts are reached and balanced is the user's."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    experts = fields.pop("experts")
    of_experts = {} if experts is None else dataclasses.asdict(experts)
    for name in ("source", "length"):
        del fields[name]
    for name in ("routing", "capacity_factor", "balance"):
        of_experts.pop(name, None)
    return {**fields, **{f"experts.{name}": value for name, value in of_experts.items()}}


def activation_of(config: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Return the function that a config names.

    Raises:
      ValueError: the model does not compute it.
    """
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise ValueError(
            f"the config has {key}={name!r}, and the model computes "
            + ", ".join(map(repr, ACTIVATIONS))
        )
    return ACTIVATIONS[name]


def rotary_of(
    config: Fields,
    head_width: int,
    *,
    share: float | None = None,
    pairs: Pairs = "halves",
    theta: float = 10000.0,
) -> Rotary:
    """Return the rotary positions that a config describes.

    Args:
      config: the config; "rope_parameters", or "rope_theta" and "rope_scaling", and
        "partial_rotary_factor".
      head_width: H.
      share: the share of a head that is rotated, if the config says nothing of it.
      pairs: which numbers are rotated together.
      theta: the base, if the config says nothing of it.
    """
    parameters = dict(config.get("rope_parameters") or {})
    said = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    said = share if said is None else said
    width = head_width if said is None else int(head_width * said)
    old = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    scaling = config.get("rope_scaling")
    read = rope_of_config({"rope_parameters": parameters, "rope_scaling": scaling, **old})
    if not old and "rope_theta" not in parameters:
        read["theta"] = theta
    return Rotary(theta=read["theta"], scaling=read["rope_scaling"], width=width, pairs=pairs)


def layer_paths(names: Mapping[str, str], inside: str) -> dict[str, str]:
    """Return the tensors of a block's leaves: from paths and names inside of a block."""
    return {f"layers/{{layer}}/{leaf}": f"{inside}.{name}" for leaf, name in names.items()}


def with_biases(products: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors of products: their kernels and biases."""
    kernels = {f"{leaf}/kernel": f"{name}.weight" for leaf, name in products.items()}
    return kernels | {f"{leaf}/bias": f"{name}.bias" for leaf, name in products.items()}


def with_norms(norms: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors of norms: their scales and biases."""
    scales = {f"{leaf}/scale": f"{name}.weight" for leaf, name in norms.items()}
    return scales | {f"{leaf}/bias": f"{name}.bias" for leaf, name in norms.items()}


def kernels_of(tensors: Mapping[str, str]) -> frozenset[str]:
    """Return the leaves that are [out, in] in a file: all kernels."""
    return frozenset(leaf for leaf in tensors if leaf.endswith("/kernel") or "/experts/" in leaf)
