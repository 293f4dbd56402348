"""Describes a model's Hugging Face format as data: names of tensors and keys of the config.

The data itself lies beside each model, in `gpt_format.py` and `llama_format.py`. A model class has
it as its attribute `hugging_face`.
"""

import dataclasses
import json
import math
import numbers
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .folders import is_pointer, missing_model, pointer_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """The key of a config that gives one field of a model.

    Attributes:
      name: the key in config.json.
      default: the value that Transformers takes if the key is absent.
      null: returns the value that null stands for, from the fields before this one. None means that
        null is an error.
      is_argument: whether the model is built with the field. If not, it follows from others.
      is_computed: whether the model's results depend on the field. If not, a config may differ.
      is_optional: whether null is a value of its own.
    """

    name: str
    default: Any = None
    null: Callable[[Mapping[str, Any]], Any] | None = None
    is_argument: bool = True
    is_computed: bool = True
    is_optional: bool = False

    def checked(self, value: Any) -> Any:
        """Check a value of the key, and return it.

        If the default is a flag, the value must be one too. If the default is a float, the value
        must be a number above 0; otherwise it must be a whole number above 0.

        Raises:
          ValueError: the value is something else.
        """
        is_flag = isinstance(value, bool)
        if isinstance(self.default, bool):
            fits, wanted = is_flag, "true or false"
        elif isinstance(self.default, float):
            is_number = isinstance(value, numbers.Real) and not is_flag
            fits, wanted = is_number and 0 < float(value) < math.inf, "a number above 0"
        else:
            fits = isinstance(value, numbers.Integral) and not is_flag and int(value) > 0
            wanted = "a whole number above 0"
        if not fits:
            raise ValueError(f"the config has {self.name}={value!r}; it must be {wanted}")
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """Fields that do not have one key each, such as the fields of rotary positions.

    Attributes:
      names: the names of the fields.
      read: returns their values from a config.
      write: returns keys and values of a config from the fields.
    """

    names: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused:
    """Leaves that are one tensor in a file, along the dim of outputs.

    Attributes:
      leaves: their paths, in the order of the tensor.
      groups: the attribute of the model that says how often the tensor's rows begin anew with the
        first leaf, such as "config.heads" where each head has its queries, keys and values
        together; None where each leaf's rows follow each other.
    """

    leaves: tuple[str, ...]
    groups: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """How Hugging Face stores a model. Formats are compared and hashed by identity.

    Attributes:
      architecture: the name of the class in Transformers.
      model_type: the name of the model in config.json.
      layer, stack: the path of a block's leaves: unrolled, with "{layer}" for the block's number;
        and in a scan, whose leaves have a leading layer dim.
      tensors: the name of the tensor for each leaf's path. "{layer}" in both is the block's number.
        "{expert}" in the name is the index of the leaf's dim after the layers.
      transposed: the leaves whose tensor is [out, in].
      fused: the leaves that are parts of one tensor.
      prefix: the beginning of names that files of the model without its head leave out.
      renamed: pairs of a regular expression and its replacement, which lead from other names that
        files give tensors to those of `tensors`.
      modules: a regular expression and its replacement, which lead from the names of `tensors` to
        those of the modules in Transformers, by which PEFT's adapters go; None if they are alike.
      ignored: regular expressions, without the prefix, of tensors that hold nothing learned.
      kept: regular expressions, without the prefix, of learned tensors that the model has no part
        in. An export that is like a folder has them too.
      embedding, head: the paths of two leaves. A tied model has only the embedding, for both.
      fields: the key of each of the model's fields. The model's attribute has the same name as the
        field, unless `attributes` gives another.
      attributes: the attribute of each field that has another name or place, such as "config.eps".
      fields_in: the attribute of the model that has the fields; "" for the model itself.
      extra: further fields.
      choices: for each key that no field stands for, the values that the model computes. The first
        is the meaning of an absent key, and the one that is written.
      written: returns further keys from the model.
    """

    architecture: str
    model_type: str
    layer: str
    stack: str
    tensors: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    fused: tuple[Fused, ...] = ()
    prefix: str
    renamed: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, str] | None = None
    ignored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    embedding: str
    head: str
    fields: Mapping[str, Key]
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields_in: str = ""
    extra: Extra = Extra()
    choices: Mapping[str, tuple[Any, ...]]
    written: Callable[[Any], dict[str, Any]] = lambda model: {}

    def bare(self, name: str) -> str:
        """Return the name by which the format knows a tensor of a file, without the prefix."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name.removeprefix(self.prefix)

    def is_kept(self, bare: str) -> bool:
        """Return whether a tensor is learned, and no part of the model."""
        return any(re.fullmatch(pattern, bare) for pattern in self.kept)

    def read_config(self, folder: str | Path) -> dict[str, Any]:
        """Return the contents of a folder's config.json; see the function of this name."""
        return read_config(folder)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which a config says to build the model.

        Raises:
          ValueError: the config describes another kind of model, or something that the model does
            not compute.
        """
        if problems := self._unknown(config):
            raise ValueError(f"the config cannot be followed: {'; '.join(problems)}")
        keys = {field: key for field, key in self.fields.items() if key.is_argument}
        return self._resolve(keys, config) | self.extra.read(config)

    def differences(self, config: Mapping[str, Any], model: Any) -> list[str]:
        """Return the differences between a config and a model, in words with both values.

        Raises:
          ValueError: a key is null that must have a value, or the extra fields cannot be read.
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
        """Return the config of a model whose tensors have a dtype.

        Special tokens belong to a tokenizer, so they are null.
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
            # Transformers 5 reads the first, earlier versions the second.
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def _unknown(self, config: Mapping[str, Any]) -> list[str]:
        """Return, in words, the settings of a config that the model does not compute."""
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
            if value is None and key.is_optional:
                fields[field] = None
                continue
            if value is None:
                if key.null is None:
                    raise ValueError(f"the config has {key.name}=null; it must have a value")
                value = key.null(fields)
            fields[field] = key.checked(value)
        return fields

    def _of_model(self, model: Any) -> dict[str, Any]:
        def value(field: str) -> Any:
            inside = f"{self.fields_in}.{field}" if self.fields_in else field
            return operator.attrgetter(self.attributes.get(field, inside))(model)

        known = {key.name: value(field) for field, key in self.fields.items()}
        return self._resolve(self.fields, known) | {name: value(name) for name in self.extra.names}


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the contents of a config.json.

    Args:
      source: the file, or its folder.

    Raises:
      ValueError: the file is missing or damaged.
    """
    path = Path(source)
    folder = path
    if path.is_file() and path.suffix != ".json":
        raise ValueError(missing_model(path))
    path = path if path.is_file() else path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; {missing_model(folder)}"
        ) from error
    except ValueError as error:
        if is_pointer(path):
            raise ValueError(pointer_text(path)) from error
        raise ValueError(
            f"{path} is damaged, it does not hold JSON: {error}; download it anew"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, and not a config's keys")
    return config
