"""`read`: turns a DeepSpeed configuration into the options of a `ZeroConfig`.

Only keys that the configuration has are taken over. DeepSpeed's own defaults are not: among other
things they would keep every leaf of a model below 1e9 elements gathered.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroxla.config.deepspeed.keys import TOP
from zeroxla.config.deepspeed.offload import offload_of
from zeroxla.config.deepspeed.optimizers import make_optimizer
from zeroxla.config.deepspeed.sections import Findings, Key, checked, nearest, take
from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_COUNTS = {
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "stage3_prefetch_bucket_size": "prefetch_bucket",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_model_persistence_threshold": "model_persistence_cap",
}
_LARGEST_SCALE = 24  # a power of 2; `step.state.LossScale` keeps the scale at or below it
_NEVER = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedSettings:
    """The options of a DeepSpeed configuration, and the keys that have no effect."""

    options: dict[str, Any]
    """The fields of the `ZeroConfig` that the configuration asks for, by name."""

    ignored: dict[str, str]
    """Keys that have no effect here, or another effect than in DeepSpeed, such as
    "zero_optimization.overlap_comm", and the reason for each."""

    def warning(self) -> str:
        """Return a text that lists the ignored keys; "" if there are none."""
        if not self.ignored:
            return ""
        lines = ["these keys of the DeepSpeed configuration have no effect, or another one, here:"]
        by_reason: dict[str, list[str]] = {}  # "auto" has one reason for all of its keys
        for key, reason in self.ignored.items():
            by_reason.setdefault(reason, []).append(key)
        lines += [f"  {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
        return "\n".join(lines)


def read(
    source: str | os.PathLike[str] | Mapping[str, Any], *, auto: Mapping[str, Any] | None = None
) -> DeepSpeedSettings:
    """Read a DeepSpeed configuration.

    Args:
      source: the path of a JSON file, or a mapping with the content of one. As DeepSpeed's reader
        does, it takes comments, commas before a closing bracket, and a byte order mark.
      auto: the values of keys that are written "auto", by dotted name, such as
        {"scheduler.params.total_num_steps": 1000}. Hugging Face's Trainer fills these in from its
        arguments. A largest rate of warm-up takes the optimizer's rate. Other keys that are
        written "auto" count as not written.

    Raises:
      ValueError: the file is missing or holds no JSON object, a key is nearly one of DeepSpeed's,
        or stands in the wrong section, or a value has the wrong type, is out of range or
        contradicts another. One message tells all problems.
      NotImplementedError: zeroxla lacks the optimizer or the scheduler, and nothing else is wrong.

    >>> settings = read({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})
    >>> settings.options["hpz_size"], settings.ignored
    (8, {})
    """
    values = dict(source) if isinstance(source, Mapping) else load(source)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # DeepSpeed's first format
        values["zero_optimization"] = {"stage": int(zero)}
    found = Findings(auto={**_rates(values), **(auto or {})})
    known = _in_their_places(values, found)
    written = take(known, TOP, found, lenient=True)
    options: dict[str, Any] = {}
    for part in (_zero, _dtypes, _batch):
        with found.collected():
            options |= part(written, found.ignored)
    if written.get("gradient_allreduce_op", "mean").lower() != "mean":
        found.problems.append(
            ValueError(
                f"gradient_allreduce_op={written['gradient_allreduce_op']!r} is refused by "
                'DeepSpeed at stage 3 too; gradients are averaged over devices: write "mean"'
            )
        )
    options["optimizer"] = make_optimizer(written, found)
    found.check()
    return DeepSpeedSettings(options=options, ignored=found.ignored)


def _rates(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest rate of a warm-up that is written "auto": the optimizer's own."""
    section = values.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    rate = params.get("lr") if isinstance(params, Mapping) else None
    return {} if rate in (None, "auto") else {"scheduler.params.warmup_max_lr": rate}


def _in_their_places(values: Mapping[str, Any], found: Findings) -> dict[str, Any]:
    """Return the values without the keys that stand in another section than their own."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        homes = [s for s, key in TOP.items() if key.alias is None and name in (key.keys or ())]
        if name not in TOP and len(homes) == 1:
            found.problems.append(
                ValueError(f"{name!r} stands at the top level and belongs into {homes[0]!r}")
            )
            continue
        known = TOP[name].keys if name in TOP else None
        if known is not None and isinstance(value, Mapping):
            strays = [inner for inner in value if inner not in known and inner in TOP]
            found.problems.extend(
                ValueError(f"{inner!r} stands in {name!r} and belongs at the top level")
                for inner in strays
            )
            value = {k: v for k, v in value.items() if k not in strays}
        kept[name] = value
    return kept


def load(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object that a JSON file holds, as it is written.

    Raises:
      ValueError: there is no such file, or it holds none.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"a DeepSpeed configuration is the path of a JSON file or a dict, not a "
            f"{type(source).__name__}"
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no DeepSpeed configuration at {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as text: {error}") from None
    try:
        values = json.loads(_plain_json(text), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is no JSON, at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{str(path)!r} holds a {type(values).__name__}; a DeepSpeed configuration is an "
            "object of keys and values"
        )
    return values


_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = r"//[^\n]*|#[^\n]*|/\*.*?\*/"
_LAST_COMMA = r"(?<=[\w\"}\]]),(?=\s*[}\]])"


def _plain_json(text: str) -> str:
    """Return JSON without comments and commas before a closing bracket, which DeepSpeed's reader
    takes. Each gives way to as many blanks, so that errors still name the right line and column."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    # A string is matched first, since what looks like a comment in it is none.
    text = re.sub(f"{_STRING}|{_COMMENT}", blank, text, flags=re.DOTALL)
    return re.sub(f"{_STRING}|{_LAST_COMMA}", blank, text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. A key that stands twice raises ValueError: JSON's own reader
    would drop one of its values."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} is written {names.count(name)} times in one object")
    return dict(pairs)


def _zero(written: Mapping[str, Any], ignored: dict[str, str]) -> dict[str, Any]:
    """Return the options of the section `zero_optimization` and of
    `zero_force_ds_cpu_optimizer`."""
    zero = written.get("zero_optimization", {})
    stage = zero.get("stage", 3)
    if stage > 3:
        raise ValueError(f"zero_optimization.stage={stage} must be 0, 1, 2 or 3")
    if stage < 3:
        ignored["zero_optimization.stage"] = (
            f"stage {stage} runs as stage 3: gradients, leaves and optimizer state are split; the "
            "numbers of a step are the same"
        )
    options: dict[str, Any] = {field: zero[key] for key, field in _COUNTS.items() if key in zero}
    on_host = written.get("zero_force_ds_cpu_optimizer", False)
    options |= offload_of(zero, ignored, on_host=on_host)
    if "zero_hpz_partition_size" in zero:
        options["hpz_size"] = max(1, zero["zero_hpz_partition_size"])
    if zero.get("zero_quantized_weights"):
        options["weight_wire"] = WireFormat(bits=8)
    if zero.get("zero_quantized_gradients"):
        options["gradient_wire"] = WireFormat(bits=4)
    loco = zero.get("zeropp_loco_param")
    if loco is None:
        return options
    if "gradient_wire" not in options:
        ignored["zero_optimization.zeropp_loco_param"] = (
            "it feeds back what quantized gradients lose, and zero_quantized_gradients is not set"
        )
        return options
    options["error_feedback"] = Feedback(
        momentum=loco.get("err_beta", 0.8), reset_every=loco.get("reset_T", 1024)
    )
    return {**options, "inter_node_reduce": "step"}


def _dtypes(written: Mapping[str, Any], ignored: dict[str, str]) -> dict[str, Any]:
    """Return the options of dtypes and of the loss scale."""
    fp16, bf16 = written.get("fp16", {}), written.get("bf16", {})
    options: dict[str, Any] = {}
    travel = written.get("communication_data_type")
    if travel is not None:
        if travel.lower() not in _DTYPES:
            raise ValueError(
                f"communication_data_type={travel!r}; take one of {tuple(_DTYPES)}, the nearest is "
                f"{nearest(travel, _DTYPES)!r}"
            )
        options["reduce_dtype"] = _DTYPES[travel.lower()]
    if fp16.get("enabled") and bf16.get("enabled"):
        raise ValueError("fp16.enabled and bf16.enabled are both true; set one of them")
    if bf16.get("enabled"):
        options["compute_dtype"] = "bfloat16"
    if not fp16.get("enabled"):
        return options
    options["compute_dtype"] = "float16"
    fixed = fp16.get("loss_scale", 0)
    if fixed:
        checked("fp16.loss_scale", fixed, Key(kind="number", least=2.0**-14))
        if fixed > 2**_LARGEST_SCALE:
            raise ValueError(f"fp16.loss_scale={fixed:g} must be 2^{_LARGEST_SCALE} or less")
        ignored["fp16.loss_scale"] = (
            f"the scale stays {fixed:g} until a gradient overflows; then it halves, once for each "
            "step that overflows, and that step is skipped"
        )
        return {**options, "init_loss_scale": fixed, "loss_scale_window": _NEVER}
    if "initial_scale_power" in fp16:
        power = fp16["initial_scale_power"]
        if power > _LARGEST_SCALE:
            ignored["fp16.initial_scale_power"] = (
                f"the scale begins at 2^{_LARGEST_SCALE}, which it never passes"
            )
        options["init_loss_scale"] = 2.0 ** min(power, _LARGEST_SCALE)
    if "loss_scale_window" in fp16:
        options["loss_scale_window"] = fp16["loss_scale_window"]
    return options


def _batch(written: Mapping[str, Any], ignored: dict[str, str]) -> dict[str, Any]:
    """Return the options of micro-batches."""
    whole = written.get("train_batch_size")
    micro = written.get("train_micro_batch_size_per_gpu")
    steps = written.get("gradient_accumulation_steps")
    options: dict[str, Any] = {}
    if micro is not None:
        options["micro_batch"] = micro
    if steps is not None:
        options["accumulate"] = steps
    if whole is None:
        return options
    parts = (micro or 1) * (steps or 1)
    if whole % parts:
        names = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        words = " x ".join(f"{name}={n}" for name, n in names.items() if n is not None)
        raise ValueError(
            f"train_batch_size={whole} is no multiple of {words}"
            + (f" = {parts}" if micro is not None and steps is not None else "")
        )
    if micro is None or steps is None:
        missing = (
            "gradient_accumulation_steps" if steps is None else "train_micro_batch_size_per_gpu"
        )
        ignored["train_batch_size"] = (
            f"what follows from it depends on the number of devices, which is the mesh's; write "
            f"{missing} (without it: {'1' if steps is None else 'any'})"
        )
    return options
