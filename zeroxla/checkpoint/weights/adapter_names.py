"""Maps leaves with adapters to the modules and tensors of a PEFT adapter.

PEFT keeps an adapter in `adapter_model.safetensors` and `adapter_config.json`. A module's tensors
are `base_model.model.<module>.lora_A.weight` [rank, in], `lora_B.weight` [out, rank] and, with
DoRA, `lora_magnitude_vector` [out]. A leaf of a scan stands for a module of each layer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zeroxla.checkpoint.weights.tensor_names import NamedLeaf, Shape, abstract, format_of
from zeroxla.frontend.lora.leaf_plan import LORA, LoraPlan
from zeroxla.program.paths import Path

if TYPE_CHECKING:
    from zeroxla.models.format import Format

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
"""The parts of an adapter, and the ends of their tensors' names."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModules:
    """The modules that a leaf is the weight of.

    Attributes:
      names: the names of modules in Transformers: one, or one for each layer of a scan.
      is_stacked: whether the leaf has a leading layer dim.
      is_transposed: whether the module's weight is the leaf's (or the layer's) transpose.
    """

    names: tuple[str, ...]
    is_stacked: bool
    is_transposed: bool


def modules_of(path: Path, shape: Shape, format: Format) -> AdaptedModules | None:
    """Return the modules whose weight a leaf is; None if it is no module's weight, or shares one
    with other leaves or experts.

    Args:
      path: the path of the leaf.
      shape: its natural shape.
      format: the model's format.
    """
    name = "/".join(path)
    for line, tensor in format.tensors.items():
        module, _, last = tensor.rpartition(".")
        parts = re.fullmatch(r"(\d+)".join(map(re.escape, line.split("{layer}"))), name)
        is_stacked = parts is None and line.replace(format.layer, format.stack) == name
        if last != "weight" or not (parts or is_stacked):
            continue
        if "{expert}" in tensor or any(line in fused.leaves for fused in format.fused):
            return None
        module = module if format.modules is None else re.sub(*format.modules, module)
        layers = parts.groups() if parts else range(shape[0])
        return AdaptedModules(
            names=tuple(module.replace("{layer}", str(i)) for i in layers or ("",)),
            is_stacked=is_stacked,
            is_transposed=line in format.transposed,
        )
    return None


def known_format(model: Any) -> Format:
    """Return the format of a model without adapters.

    Raises:
      ValueError: it has none.
    """
    module = abstract(model)
    format = format_of(module)
    if format is None:
        raise ValueError(
            f"a {type(module).__name__} has no Hugging Face format, by whose names a PEFT adapter "
            "says where it belongs; use a model whose class has the attribute hugging_face, such "
            "as GPT or Llama, or a checkpoint"
        )
    return format


def model_modules(shapes: Mapping[Path, Shape], format: Format) -> dict[Path, AdaptedModules]:
    """Return the modules of each leaf that is the weight of some."""
    found = ((path, modules_of(path, shape, format)) for path, shape in shapes.items())
    return {path: modules for path, modules in found if modules is not None}


def adapter_leaves(plan: LoraPlan, format: Format) -> list[NamedLeaf]:
    """Return the leaves of adapters, by their paths in the state, and the tensors of each.

    Raises:
      ValueError: a leaf with an adapter is no module's weight, or has more than two dims in a
        layer.
    """
    found = []
    for path in plan.targets:
        modules, leaf = modules_of(path, plan.dense[path].shape, format), plan.dense[path]
        if modules is None or len(leaf.contracted) != 1 or len(leaf.others) != 1:
            raise ValueError(
                f"the leaf {'/'.join(path)} {leaf.shape} has an adapter, and is not the whole "
                f"weight of a linear layer of {format.architecture}; leave it out of targets="
            )
        for part, shape in plan.adapter_shapes(path).items():
            found.append(
                NamedLeaf(
                    path=(LORA, *path, part),
                    shape=shape,
                    tensors=tuple(f"{PREFIX}{name}.{PARTS[part]}" for name in modules.names),
                    stack=shape[:1] if modules.is_stacked else (),
                    is_transposed=part != "m",
                )
            )
    return found


def is_conv1d(plan: LoraPlan, path: Path, format: Format) -> bool:
    """Return whether the weight of a leaf's modules is [in, out], as the one of GPT-2's Conv1D."""
    leaf, modules = plan.dense[path], modules_of(path, plan.dense[path].shape, format)
    assert modules is not None, "adapter_leaves has refused it"
    return (leaf.contracted[0] < leaf.others[0]) != modules.is_transposed


def target_modules(plan: LoraPlan, shapes: Mapping[Path, Shape], format: Format) -> list[str]:
    """Return names that PEFT finds the modules with adapters by, and no others.

    PEFT takes a module if its name is one of these, or ends with a dot and one of these. Short
    names such as "q_proj" are taken if they suffice; otherwise all names are written out.
    """
    every = model_modules(shapes, format)
    names = {name for modules in every.values() for name in modules.names}
    wanted = {name for path in plan.targets for name in every[path].names}
    ends = {_last(name) for name in wanted}
    found = {name for name in names if _last(name) in ends}
    return sorted(ends) if found == wanted else sorted(wanted)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
