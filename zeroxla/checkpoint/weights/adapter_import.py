"""`lora_from_adapter` and `read_adapter`: PEFT's adapters as models and arrays with adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from zeroxla.checkpoint.weights.adapter_names import (
    CONFIG,
    PARTS,
    PREFIX,
    TENSORS,
    adapter_leaves,
    known_format,
    model_modules,
)
from zeroxla.checkpoint.weights.leaf_in_files import leaves_in_files
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader, check_dtype
from zeroxla.checkpoint.weights.tensor_names import abstract, param_shapes
from zeroxla.frontend.base import Tree, to_nested
from zeroxla.frontend.lora.at_rest import Frozen
from zeroxla.frontend.lora.leaf_plan import LORA
from zeroxla.frontend.lora.model import LoraModel, lora
from zeroxla.models.folders import is_pointer, missing_adapter, pointer_text

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "corda_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys of a config that change what an adapter is, and their values for those that are computed
here. Some ways to initialise adapters change the base, too."""


def lora_from_adapter(
    model: Any, folder: str | FilePath, *, frozen: Frozen | None = None
) -> LoraModel:
    """Return a model with adapters on the leaves that a PEFT adapter has some for, of its rank and
    kind.

    `zeroxla.from_pretrained(adapter=)` or `zeroxla.read_adapter` then give a state their values.

    Args:
      model: a `GPT`, a function `rngs -> Llama`, or another model with a Hugging Face format.
      folder: holds `adapter_config.json` and `adapter_model.safetensors`.
      frozen: how the base is stored; see `zeroxla.lora`.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the folder holds no adapter, or one with a setting that is not computed here, with
        several ranks, or for modules that the model does not have.
    """
    config, reader = _read(FilePath(folder).expanduser())
    format, shapes = known_format(model), param_shapes(abstract(model))
    adapted = {module for name in reader.tensors if (module := _module(name)) is not None}
    every = model_modules(shapes, format)
    names = {name for modules in every.values() for name in modules.names}
    if unknown := sorted(adapted - names):
        raise ValueError(
            f"{reader.folder} has an adapter for {unknown[0]}, which is no module of the "
            f"{format.architecture} that is given; give the model that it is of"
        )
    targets = []
    for path, modules in every.items():
        there = [name for name in modules.names if name in adapted]
        if there and len(there) < len(modules.names):
            raise ValueError(
                f"{reader.folder} has adapters for {len(there)} of the {len(modules.names)} layers "
                f"of {'/'.join(path)}, such as {there[0]}; build the model with scan=False, so "
                "that each layer has leaves of its own"
            )
        targets += ["/".join(path)] if there else []
    return lora(
        model,
        targets=f"^({'|'.join(map(re.escape, targets))})$",
        rank=config["r"],
        alpha=config["lora_alpha"],
        rank_stabilized=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        frozen=frozen,
    )


def read_adapter(model: LoraModel, folder: str | FilePath) -> Tree:
    """Return the leaves of a PEFT adapter as the tree that `lora` of a state's parameters is.

    `zeroxla.init_from(step, {"base": params, "lora": read_adapter(model, folder)}, key)` makes a
    state of them and of a base from anywhere. Leaves are read when they are stored.

    Args:
      model: what `lora_from_adapter` returned for the folder; its step has seen a batch.
      folder: holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the adapter is of another rank or kind, its tensors are not those of the model's
        adapters, or for the reasons of `lora_from_adapter`.
    """
    config, reader = _read(FilePath(folder).expanduser())
    here = {
        "r": model.rank,
        "lora_alpha": model.alpha,
        "use_rslora": model.rank_stabilized,
        "use_dora": model.dora,
    }
    there = {name: config.get(name) or type(value)() for name, value in here.items()}
    if different := [
        f"{name}={there[name]!r} and not {value!r}"
        for name, value in here.items()
        if there[name] != value
    ]:
        raise ValueError(
            f"the adapter in {reader.folder} has {', '.join(different)}; make the model with "
            "zeroxla.lora_from_adapter"
        )
    leaves = adapter_leaves(model.plan, known_format(model.model))
    wanted = {name: leaf for leaf in leaves for name in leaf.tensors}
    names = {_bare(name): name for name in reader.tensors}
    for name in (*wanted, *names):
        if name not in wanted or name not in names:
            lacks = f"lacks {name}" if name in wanted else f"has {names[name]}"
            raise ValueError(
                f"{reader.folder} {lacks}, unlike the model's adapters; make the model with "
                "zeroxla.lora_from_adapter"
            )
    for name, leaf in wanted.items():
        stored = reader.tensors[names[name]]
        check_dtype(names[name], stored)
        if stored.shape != leaf.tensor_shape:
            raise ValueError(
                f"the tensor {names[name]} in {stored.file} has the shape {list(stored.shape)}, "
                f"and the adapter of the model's leaf {'/'.join(leaf.path[1:-1])} needs "
                f"{list(leaf.tensor_shape)}"
            )
    return to_nested(leaves_in_files(leaves, reader, names))[LORA]


def _read(folder: FilePath) -> tuple[dict[str, Any], TensorReader]:
    """Return an adapter's config and its tensors.

    Raises:
      ValueError: it is missing, damaged, or has a setting that is not computed here.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; {missing_adapter(folder)}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if is_pointer(path):
            raise ValueError(pointer_text(path)) from error
        raise ValueError(
            f"{path} is damaged, or of another kind than LORA ({error!r}); save the adapter anew"
        ) from error
    wrong = [
        f"{name}={config[name]!r}"
        for name, values in _PLAIN.items()
        if name in config and not _is_one_of(config[name], values)
    ]
    wrong += [
        f"{name}={config[name]!r}"
        for name, usual in (("rank_pattern", rank), ("alpha_pattern", alpha))
        if any(value != usual for value in _values(config.get(name)))
    ]
    if wrong:
        raise ValueError(
            f"{path} has {', '.join(wrong)}, which zeroxla's adapters do not compute; merge it in "
            "PEFT (merge_and_unload) and take the merged model, or train one without"
        )
    if not (folder / TENSORS).is_file():
        raise ValueError(missing_adapter(folder))
    return config, TensorReader(folder, TENSORS)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == one and type(value) is type(one) for one in values)


def _values(pattern: Mapping[str, Any] | None) -> list[Any]:
    return list((pattern or {}).values())


def _bare(name: str) -> str:
    """Return a tensor's name as PEFT writes it now: some versions add `.weight` to magnitudes."""
    return name.removesuffix(".weight") if name.endswith(f"{PARTS['m']}.weight") else name


def _module(name: str) -> str | None:
    """Return the module of a tensor; None if the tensor is no A."""
    if not name.startswith(PREFIX) or not name.endswith(f".{PARTS['a']}"):
        return None
    return name.removeprefix(PREFIX).removesuffix(f".{PARTS['a']}")
