"""The DeepSpeed configuration of a run: what it says, and the copy that the run keeps.

The file of --deepspeed may change. Programs that start DeepSpeed fill in what the file leaves to
them with "auto"; the run does so too, and its copy has the values.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroxla.cli.zero_options import ZeroOptions

DEEPSPEED = "deepspeed.json"
"""The file of a run with the DeepSpeed configuration that it began with."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def kept_deepspeed(options: ZeroOptions, run: Path | None) -> Path | None:
    """Return the DeepSpeed configuration of a run: its copy, or in a new run the option's file.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.
    """
    if options.deepspeed is None:
        return None
    copy = None if run is None else run / DEEPSPEED
    return copy if copy is not None and copy.is_file() else options.deepspeed.expanduser()


def contents(file: Path | None) -> dict[str, Any]:
    """Return the object in a DeepSpeed configuration; {} if there is none. What is wrong with a
    file is said where all of it is read."""
    from zeroxla.config.deepspeed.reader import load  # here, because it imports JAX

    try:
        return {} if file is None else load(file)
    except ValueError:
        return {}


def said_dtype(values: Mapping[str, Any]) -> str | None:
    """Return the dtype that a configuration decides on, also by switching bf16 off; else None."""
    from zeroxla.config.deepspeed.sections import flag_of

    on = {name: flag_of(_section(values, name).get("enabled")) for name in _DTYPES}
    for name, dtype in _DTYPES.items():
        if on[name]:
            return dtype
    return "float32" if on["bf16"] is False else None


def says_optimizer(source: Path | Mapping[str, Any] | None) -> bool:
    """Return whether a configuration has an optimizer or a scheduler."""
    values = source if isinstance(source, Mapping) else contents(source)
    return bool(values.get("optimizer") or values.get("scheduler"))


def filled(file: Path, training: Any, dtype: str | None) -> Path | dict[str, Any]:
    """Return a configuration in which "auto" is replaced by what the command has chosen, as the
    program that starts DeepSpeed would do. A file without such values is returned as it is.

    Args:
      file: the file.
      training: the chosen options of the optimizer, with `steps`.
      dtype: the chosen dtype of the computation.
    """
    found = contents(file)
    warm = max(1, round(training.warmup * training.steps))
    own = {
        "optimizer": {
            "lr": training.learning_rate,
            "weight_decay": training.weight_decay,
            "betas": [training.beta1 or 0.9, training.beta2 or 0.999],
            "eps": training.epsilon or 1e-8,
        },
        "scheduler": {
            "warmup_min_lr": 0,
            "warmup_max_lr": training.learning_rate,
            "warmup_num_steps": warm,
            "total_num_steps": training.steps,
        },
    }
    made = copy.deepcopy(found)
    for section, values in own.items():
        params = _section(_section(made, section), "params")
        params.update({k: values[k] for k, x in params.items() if x == "auto" and k in values})
    for name, own_dtype in _DTYPES.items():
        if _section(made, name).get("enabled") == "auto":
            made[name]["enabled"] = dtype == own_dtype
    if made.get("gradient_clipping") == "auto":
        made["gradient_clipping"] = training.clip
    made = {k: x for k, x in made.items() if x != "auto" or k not in _BATCH}  # --batch says them
    if "scheduler" in made and "optimizer" not in made:  # it would be the program's own
        made["optimizer"] = {"type": "AdamW", "params": own["optimizer"]}
    return file if made == found else made


def takes(values: Mapping[str, Any]) -> set[str]:
    """Return the names of options that fill in an "auto" of a configuration."""
    keys = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "epsilon"}
    keys |= {"warmup_num_steps": "warmup", "warmup_max_lr": "learning_rate"}
    found = {"clip"} if values.get("gradient_clipping") == "auto" else set()
    if "scheduler" in values and "optimizer" not in values:
        found |= {"learning_rate", "weight_decay", "beta1", "beta2", "epsilon"}
    for section in ("optimizer", "scheduler"):
        params = _section(_section(values, section), "params")
        found |= {keys[k] for k, x in params.items() if x == "auto" and k in keys}
        if params.get("betas") == "auto":
            found |= {"beta1", "beta2"}
    return found


def keep_deepspeed(
    options: ZeroOptions, run: Path, made: Path | Mapping[str, Any] | None = None
) -> None:
    """Write the configuration into a new run's folder.

    Args:
      options: the run's options.
      run: the run's folder.
      made: what `filled` made of the file; None if nothing.

    Raises:
      ValueError: it cannot be written.
    """
    if options.deepspeed is None:
        return
    try:
        if isinstance(made, Mapping):
            (run / DEEPSPEED).write_text(json.dumps(made, indent=2) + "\n")
        else:
            shutil.copyfile(options.deepspeed.expanduser(), run / DEEPSPEED)
    except OSError as error:
        raise ValueError(
            f"cannot copy --deepspeed {options.deepspeed} to {run}: {error.strerror}"
        ) from error


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
