"""The options of a `ZeroConfig`, which train, rlhf and plan share, and how they make one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from zeroxla.cli.offload_options import PlannedOffload
from zeroxla.cli.option_groups import flag
from zeroxla.cli.outer_options import OuterOptions
from zeroxla.cli.wire_text import NONE, wire_fields, wire_format
from zeroxla.config.undecided import AUTO

if TYPE_CHECKING:
    from zeroxla.config.zero_config import ZeroConfig

_Dtype = Literal["float32", "bfloat16", "float16"]
_Often = Literal["microbatch", "step"]


def check_number_or_auto(name: str, text: str, words: str = "auto, or a number") -> None:
    """Check an option that is a number of at least 1, or left to a memory budget.

    Raises:
      ValueError: it is neither.
    """
    if text != AUTO and not (text.isdecimal() and int(text)):
        raise ValueError(f"{flag(name)} {text}: give {words}, 1 or more")


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """ZeRO: a preset or a DeepSpeed configuration. Every other flag changes one field of it."""

    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Preset. zero3: full precision. zeropp: ZeRO++ as in its paper. zeropp_hq: the best quality at
    zeropp's bytes. zeropp_min: the fewest bytes between hosts."""
    deepspeed: Path | None = None
    """DeepSpeed configuration, a JSON file, instead of a preset. A run keeps a copy. If the file
    has an optimizer, it takes the place of --optimizer and of the rates beside it."""
    compute_dtype: _Dtype | None = None
    """Dtype of the computation, and of parameters on the wire. The master copy is float32. Default:
    float32; with --init the dtype that the folder's config.json names; and for a plan bfloat16, in
    which large models are trained."""
    accumulate: str | None = None
    """Micro-batches per step. They pass through the stages of --pipe one after the other; without
    stages their gradients are added up. With `auto` the budget of --device-memory takes a number.
    Default: 1; when --pipe trains, as many as divide the batch, up to twice the number of
    stages."""
    frozen: tuple[str, ...] = ()
    """Regular expressions that are searched in leaf paths such as h/attn/c_attn/kernel; matching
    leaves are not trained."""
    rewrite: bool = False
    """Rewrite what keeps much memory in the model's trace, each after a trial on a small instance:
    attention, losses of logits, norms."""
    device_memory: str | None = None
    """Memory of a device that a step may take, such as 24GB, or `device` for all that it has. What
    backward reads is kept, computed again or sent to the host so that it fits. Default: keep all
    of it."""
    init_loss_scale: float | None = None
    """Loss scale of the first step in float16. Default: 32768."""
    loss_scale_window: int | None = None
    """Finite steps after which the loss scale of float16 doubles. Default: 1000."""

    def __post_init__(self) -> None:
        if self.accumulate is not None:
            object.__setattr__(self, "accumulate", str(self.accumulate))  # a run's file has numbers
            check_number_or_auto("accumulate", self.accumulate)
        if self.deepspeed is not None and self.zero != "zero3":
            raise ValueError(
                f"--deepspeed {self.deepspeed} with --zero {self.zero}: each says all options; "
                "leave one out, and give single options as flags"
            )


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Wires. A format is `none`, or int8 or int4 with a block, such as int8/256, and then any of
    these words, with commas: rotated, stochastic, asymmetric, bound, mse or deepspeed (the rule of
    the step), bfloat16 or float32 (the dtype of the step). An example is int4/128,rotated."""

    weight_wire: str | None = None
    """Format of gathered leaves. Default: as --zero has it; so in all of this group."""
    gradient_wire: str | None = None
    """Format of gradients on the hop over `device`."""
    inter_node_gradient_wire: str | None = None
    """Format of gradients on the hop over `node`."""
    weight_differences: str | None = None
    """Format of differences to a kept copy, which cross nodes once in a step instead of the leaves.
    Needs --hpz-size node."""
    error_feedback: str | None = None
    """Format in which the error of a gradient's hop over `node` is kept and added in the next step.
    Needs --inter-node-reduce step."""
    error_feedback_momentum: float | None = None
    """Share of the old error that is kept. Default: 0."""
    error_feedback_reset: int | None = None
    """Steps after which the error is dropped. Default: 512."""
    gather_dtype: _Dtype | None = None
    """Wire dtype of leaves that are not quantized."""
    reduce_dtype: _Dtype | None = None
    """Wire dtype of gradients that are not quantized."""
    quantize_threshold: int | None = None
    """Leaves with fewer elements are not quantized. Default: 4096."""
    unquantized: tuple[str, ...] | None = None
    """Regular expressions that are searched in leaf paths; matching leaves are not quantized.
    Default: embeddings and norms by their usual names."""

    def __post_init__(self) -> None:
        for name in (*_WIRES, "error_feedback"):
            text = getattr(self, name)
            if text is not None:
                wire_fields(flag(name), text)
        given = [
            flag(name)
            for name in ("error_feedback_momentum", "error_feedback_reset")
            if getattr(self, name) is not None
        ]
        if given and self.error_feedback in (None, NONE):
            raise ValueError(
                f"{', '.join(given)}: without effect, no error is kept; give --error-feedback int8"
            )


@dataclass(frozen=True, kw_only=True)
class HopOptions:
    """Secondary shards, and how often something crosses nodes. Default: as --zero has it."""

    hpz_size: str | None = None
    """Number of devices that share a copy of a leaf from forward to backward (secondary shards), so
    that backward gathers among them only. `node` means the devices of a node, 1 keeps no copy, and
    with `auto` the budget of --device-memory decides between them."""
    secondary: Literal["compute", "wire"] | None = None
    """Form of a quantized leaf's secondary shard: dequantized, or as it travels, which takes less
    memory and more computation."""
    inter_node_gather: _Often | None = None
    """When leaves cross nodes in forward: in every micro-batch, or once in a step."""
    inter_node_reduce: _Often | None = None
    """When gradients cross nodes: in every micro-batch, or once after the last one."""

    def __post_init__(self) -> None:
        if self.hpz_size not in (None, "node"):
            check_number_or_auto("hpz_size", self.hpz_size, "node, auto, or a number of devices")


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What is gathered together, ahead and for how long. Numbers are elements."""

    unit_elements: int | None = None
    """Largest number of elements that are gathered together. Default: one repeated block of the
    model, or 4 Mi elements."""
    prefetch_bucket: int | None = None
    """Largest number of elements that are gathered ahead of their use. Default: room for the next
    unit; 0 on CPUs."""
    max_live_parameters: int | None = None
    """Largest number of elements that stay gathered for a later use. Default: 0; with
    --device-memory, what fits."""
    max_reuse_distance: int | None = None
    """A leaf stays gathered if at most this many elements are gathered before its next use.
    Default: as for --max-live-parameters."""
    persistence_threshold: int | None = None
    """Largest number of elements of a leaf that stays gathered for the whole step. Default: 100000;
    with quantized wires less in a small model."""
    model_persistence_cap: int | None = None
    """Largest number of elements of all such leaves together. Default: no limit."""


class ZeroGroups(Protocol):
    """Options with the groups of a `ZeroConfig`."""

    @property
    def zero(self) -> ZeroOptions: ...
    @property
    def wires(self) -> WireOptions: ...
    @property
    def hops(self) -> HopOptions: ...
    @property
    def fetch(self) -> FetchOptions: ...
    @property
    def offload(self) -> PlannedOffload: ...


LEAST: Mapping[str, float] = {
    "zero.loss_scale_window": 1,
    "wires.error_feedback_momentum": 0,
    "wires.error_feedback_reset": 1,
    "wires.quantize_threshold": 0,
    "fetch.unit_elements": 1,
    "fetch.prefetch_bucket": 0,
    "fetch.max_live_parameters": 0,
    "fetch.max_reuse_distance": 0,
    "fetch.persistence_threshold": 0,
    "fetch.model_persistence_cap": 0,
}
"""The least values of numbers in these groups, for `OptionGroups.check_at_least`."""

_WIRES = ("weight_wire", "gradient_wire", "inter_node_gradient_wire", "weight_differences")


def zero_config(
    options: ZeroGroups,
    usual: Mapping[str, Any],
    *,
    deepspeed: Path | Mapping[str, Any] | None = None,
    path: Path | None = None,
    outer: OuterOptions | None = None,
) -> ZeroConfig:
    """Return the config of a preset or of a DeepSpeed file, with the fields that flags change.

    Args:
      options: the options.
      usual: fields of the config that the command has other defaults for, beside a preset.
      deepspeed: the DeepSpeed configuration to read, such as a run's copy. None means the option's.
      path: the folder of state on disk.
      outer: how islands exchange. None means that there are none.

    Raises:
      ValueError: the file or an option cannot work.
    """
    from zeroxla.config.zero_config import ZeroConfig  # here, because --help need not wait for JAX

    given = {**_given(options), "outer": outer and outer.make()}
    file = deepspeed or options.zero.deepspeed
    try:
        if file is None:
            config = getattr(ZeroConfig, options.zero.zero)(**{**usual, **given})
        else:
            config = dataclasses.replace(ZeroConfig.from_deepspeed(file), **given)
    except NotImplementedError as error:
        raise ValueError(f"--deepspeed {options.zero.deepspeed}: {error}") from error
    return dataclasses.replace(config, offload=options.offload.changed(config.offload, path))


def check_offload(options: ZeroGroups, pipe: int) -> None:
    """Check the offload options against the others. Beside --deepspeed, `Offload` checks them.

    Raises:
      ValueError: they do not go together.
    """
    if options.zero.deepspeed is None:
        hpz = options.hops.hpz_size not in (None, "1")
        options.offload.check(options.zero.zero, pipe, hpz=hpz)


def _given(options: ZeroGroups) -> dict[str, Any]:
    """Return the fields of the config that flags name."""
    zero, wires, hops = options.zero, options.wires, options.hops
    found: dict[str, Any] = {
        name: value
        for group in (zero, hops, options.fetch)
        for name, value in vars(group).items()
        if name not in ("zero", "deepspeed", "frozen", "device_memory") and value is not None
    }
    if zero.device_memory is not None:
        found["memory"] = zero.device_memory
    if zero.frozen:
        found["frozen"] = zero.frozen
    for name in ("accumulate", "hpz_size"):
        value = found.get(name)
        if value == AUTO and zero.device_memory is None:
            raise ValueError(
                f"{flag(name)} auto: no budget decides it; give --device-memory, such as 24GB, or "
                f"{flag(name)} as a number"
            )
        if value not in (None, "node", AUTO):
            found[name] = int(value)
    for name in _WIRES:
        if (text := getattr(wires, name)) is not None:
            found[name] = wire_format(flag(name), text)
    for name in ("gather_dtype", "reduce_dtype", "quantize_threshold", "unquantized"):
        if getattr(wires, name) is not None:
            found[name] = getattr(wires, name)
    if wires.error_feedback is not None:
        found["error_feedback"] = _feedback(wires)
    return found


def _feedback(wires: WireOptions) -> Any:
    """Return the value of `ZeroConfig.error_feedback`."""
    from zeroxla.config.feedback import Feedback  # here, because --help need not wait for JAX

    assert wires.error_feedback is not None
    format = wire_format("--error-feedback", wires.error_feedback)
    if format is None:
        return None
    kept, reset = wires.error_feedback_momentum, wires.error_feedback_reset
    options = {"momentum": kept, "reset_every": reset}
    return Feedback(format=format, **{n: v for n, v in options.items() if v is not None})
