"""A model's Hugging Face format as data: the names of its tensors and the keys of its config.

The data itself is beside each model, in `gpt_format.py` and `llama_format.py`; a model class has it
as its attribute `hugging_face`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """The key of a config that says one field of a model.

    Attributes:
      name: in config.json.
      default: what Transformers takes where the key is absent.
      null: of the fields before this one, what null stands for; None if null is an error.
      is_argument: whether the model is built with it; otherwise it follows from others.
      is_computed: whether what the model computes depends on it; otherwise it may differ.
    """

    name: str
    default: Any = None
    null: Callable[[Mapping[str, Any]], Any] | None = None
    is_argument: bool = True
    is_computed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """Fields that are not one key each, such as those of rotary positions.

    Attributes:
      names: of the fields.
      read: their values, of a config.
      write: keys and values of a config, of the fields.
    """

    names: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """How Hugging Face stores a model. Compared and hashed by identity.

    Attributes:
      architecture: the class in Transformers.
      model_type: what config.json calls it.
      layer, stack: where a block's leaves are, unrolled (with "{layer}") and in a scan (the leaves
        have a leading layer dim).
      tensors: the name of the tensor of each leaf's path, "{layer}" in both being the block.
      transposed: the leaves whose tensor is [out, in].
      prefix: that files of the model without its head leave out of all names.
      ignored: regular expressions of tensors that hold nothing learned, without the prefix.
      embedding, head: paths of the leaves that a tied model has as one, the embedding.
      fields: of the model, and the key of each; an attribute of the model has the same name, or
        that in `attributes`.
      attributes: the attribute that holds a field, where it has another name.
      extra: further fields.
      choices: values that the model computes, of keys of which it has no field. The first is what
        an absent key stands for, and what is written.
      written: further keys, as functions of the model.
    """

    architecture: str
    model_type: str
    layer: str
    stack: str
    tensors: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    prefix: str
    ignored: tuple[str, ...] = ()
    embedding: str
    head: str
    fields: Mapping[str, Key]
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Extra = Extra()
    choices: Mapping[str, tuple[Any, ...]]
    written: Callable[[Any], dict[str, Any]] = lambda model: {}

    def read_config(self, folder: str | Path) -> dict[str, Any]:
        """Return what is in a folder's config.json; see the function of this name."""
        return read_config(folder)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a config says to build the model with.

        Raises:
          ValueError: it is of another kind of model, or says what the model does not compute.
        """
        if problems := self._unknown(config):
            raise ValueError(f"the config cannot be followed: {'; '.join(problems)}")
        keys = {field: key for field, key in self.fields.items() if key.is_argument}
        return self._resolve(keys, config) | self.extra.read(config)

    def differences(self, config: Mapping[str, Any], model: Any) -> list[str]:
        """Return what a config says otherwise than a model, each in words with both values.

        Raises:
          ValueError: it says what no model of this kind computes.
        """
        problems = self._unknown(config)
        there = self._resolve(self.fields, config) | self.extra.read(config)
        here = self._of_model(model)
        for field, value in there.items():
            key = self.fields.get(field)
            if value != here[field] and (key is None or key.is_computed):
                name = field if key is None else key.name
                problems.append(f"{name} is {value!r}, and the model has {field}={here[field]!r}")
        return problems

    def config(self, model: Any, *, dtype: str) -> dict[str, Any]:
        """Return the config of a model, for tensors of a dtype.

        Special tokens are a tokenizer's, so there are none.
        """
        fields = self._of_model(model)
        choices = {name: values[0] for name, values in self.choices.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key.name: fields[field] for field, key in self.fields.items()},
            **self.extra.write(fields),
            **{name: value for name, value in choices.items() if value is not None},
            **self.written(model),
            "bos_token_id": None,
            "eos_token_id": None,
            # The first for Transformers 5, the second for those before.
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def _unknown(self, config: Mapping[str, Any]) -> list[str]:
        """Return what in a config the model cannot be."""
        kind = config.get("model_type")
        if kind != self.model_type:
            return [f"model_type is {kind!r}, and the model is of the type {self.model_type!r}"]
        return [
            f"{name} is {config[name]!r}, and the model computes {' or '.join(map(repr, values))}"
            for name, values in self.choices.items()
            if name in config and config[name] not in values
        ]

    def _resolve(self, keys: Mapping[str, Key], config: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for field, key in keys.items():
            value = config.get(key.name, key.default)
            if value is None:
                if key.null is None:
                    raise ValueError(f"the config has {key.name}=null; it must have a value")
                value = key.null(fields)
            fields[field] = value
        return fields

    def _of_model(self, model: Any) -> dict[str, Any]:
        def value(field: str) -> Any:
            return getattr(model, self.attributes.get(field, field))

        known = {key.name: value(field) for field, key in self.fields.items()}
        return self._resolve(self.fields, known) | {name: value(name) for name in self.extra.names}


def read_config(source: str | Path) -> dict[str, Any]:
    """Return what is in a config.json, given with or without its name.

    Raises:
      ValueError: it is missing or damaged.
    """
    path = Path(source)
    path = path if path.is_file() else path / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; give the folder of a Hugging Face model, "
            "with its config.json and its .safetensors files"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it does not hold JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, and not a config's keys")
    return config
