"""`export_adapter`: the adapters of a model as PEFT stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from zeroxla.checkpoint.weights.adapter_names import (
    CONFIG,
    TENSORS,
    adapter_leaves,
    is_conv1d,
    known_format,
    target_modules,
)
from zeroxla.checkpoint.weights.export import check_export_dtype
from zeroxla.checkpoint.weights.export_files import ExportLayout, export_leaves
from zeroxla.checkpoint.weights.safetensors_writer import make_plan
from zeroxla.checkpoint.weights.sources import WeightSource
from zeroxla.checkpoint.weights.tensor_names import shapes_of
from zeroxla.frontend.lora.checks import check_adapted
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.step.state import TrainState

_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
"""PEFT's name of the task, by the end of a class's name in Transformers."""


def export_adapter(
    source: TrainState | str | Path,
    folder: str | Path,
    *,
    model: LoraModel,
    base: str | None = None,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
    island_own: bool = False,
) -> list[Path]:
    """Write the adapters of a model, without its base, as an adapter of PEFT.

    The folder then has `adapter_model.safetensors` and `adapter_config.json`, which
    `peft.PeftModel.from_pretrained` loads on the base, and `zeroxla.lora_from_adapter` and
    `zeroxla.from_pretrained(adapter=)` read. `export_params` writes base and adapters merged.

    Args:
      source: a training state, the folder of a checkpoint, or a folder of several checkpoints,
        whose newest is taken.
      folder: the folder to write; made if missing. An older adapter in it is replaced.
      model: what `zeroxla.lora` made of a model with a Hugging Face format; its step must have seen
        a batch.
      base: the name or folder of the base, for the config's `base_model_name_or_path`. None leaves
        it open.
      dtype: "float32", "bfloat16" or "float16"; rounded to nearest, ties to even.
      progress: called after each leaf with the bytes written so far and the bytes of all tensors.
      island_own: write an island's own parameters. By default its checkpoint gives those that all
        islands share, which are evaluated.

    Returns:
      The file with tensors, in a list; an empty list in processes other than the first.

    Raises:
      ValueError: the model has no adapters or no format, a leaf with an adapter is no module of
        it, or for the reasons of `export_params`.

    In a run of several processes all must call this. Only the first one writes, into its folder.

    A base in 8 or 4 bits is not exported: PEFT adds the adapter to the floats, which differ from
    what it was trained on by the error of the quantization.

    >>> import tempfile, jax, numpy as np, zeroxla
    >>> from zeroxla.models import GPT
    >>> model = zeroxla.lora(GPT.tiny(layers=1), targets="c_attn/kernel", rank=2)
    >>> step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1))
    >>> state = step.init(jax.random.key(0), {"tokens": np.zeros((8, 9), int)})
    >>> [file.name for file in export_adapter(state, tempfile.mkdtemp(), model=model)]
    ['adapter_model.safetensors']
    """
    if not isinstance(model, LoraModel):
        raise ValueError(
            f"model={type(model).__name__}: it has no adapters; give what zeroxla.lora made, or "
            "write the whole model with export_params"
        )

    def lay_out(opened: WeightSource) -> ExportLayout:
        plan = model.plan
        check_export_dtype(dtype)
        check_adapted(plan, opened.shapes, opened.title)
        format = known_format(model.model)
        leaves = adapter_leaves(plan, format)
        config = {
            "peft_type": "LORA",
            "task_type": next(
                (task for end, task in _TASKS.items() if format.architecture.endswith(end)), None
            ),
            "base_model_name_or_path": base,
            "r": model.rank,
            "lora_alpha": int(model.alpha) if model.alpha.is_integer() else model.alpha,
            "use_rslora": model.rank_stabilized,
            "use_dora": model.dora,
            "target_modules": target_modules(plan, shapes_of(plan.shapes), format),
            "fan_in_fan_out": any(is_conv1d(plan, path, format) for path in plan.targets),
            "bias": "none",
            "lora_dropout": 0.0,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        shapes = {name: leaf.tensor_shape for leaf in leaves for name in leaf.tensors}
        return ExportLayout(
            source=opened,
            leaves=leaves,
            plan=make_plan(shapes, dtype=dtype, single=TENSORS),
            others={CONFIG: (json.dumps(config, indent=2) + "\n").encode()},
        )

    return export_leaves(source, folder, lay_out, progress, island_own)
