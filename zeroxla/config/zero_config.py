"""The options of a training setup."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optax

from zeroxla.config.deepspeed.reader import read
from zeroxla.config.feedback import Feedback
from zeroxla.config.offload import Offload
from zeroxla.config.values import dtype_name, patterns, whole_number
from zeroxla.config.wire_checks import WIRES, check_wires
from zeroxla.config.wire_format import WireFormat

# Lookup tables and norms, by the names that Flax and the models of the field give them.
UNQUANTIZED = (r"(?i)(embed|wte|wpe|pos_emb|tok_emb|norm|(^|/)ln)",)


_ZEROPP: dict[str, Any] = {
    "gather_dtype": "bfloat16",
    "reduce_dtype": "bfloat16",
    "weight_wire": WireFormat(bits=8),
    "hpz_size": "node",
}
_TWO_LEVELS: dict[str, Any] = {
    "gradient_wire": WireFormat(bits=8, block=128, hadamard=32),
    "inter_node_gradient_wire": WireFormat(bits=4, block=128, hadamard=32),
}
_DIFFERENCES: dict[str, Any] = {
    "weight_differences": WireFormat(bits=4, block=128),
    "inter_node_reduce": "step",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a model is sharded, gathered, reduced and stepped.

    Without options this is ZeRO-3. `zero3`, `zeropp`, `zeropp_hq` and `zeropp_min` are named sets
    of them, and `from_deepspeed` reads DeepSpeed's.

    The master copy of every leaf, the optimizer's arithmetic and all sums over devices are float32.
    Counts of elements are DeepSpeed's; the option it is called there is named with each field.
    """

    compute_dtype: str = "float32"
    """Dtype in which the model computes: float32, bfloat16 or float16. Floating leaves of the batch
    are cast to it too. float16 brings dynamic loss scaling."""

    gather_dtype: str | None = None
    """Dtype in which leaves travel that are not quantized; compute_dtype if None."""

    reduce_dtype: str | None = None
    """Dtype in which gradients travel that are not quantized; float32 if None.
    (communication_data_type)"""

    weight_wire: WireFormat | None = None
    """Format of gathers, on every hop (qwZ). None: none is quantized. (zero_quantized_weights)"""

    gradient_wire: WireFormat | None = None
    """Format in which gradients make the hop over `device` (qgZ). (zero_quantized_gradients)"""

    inter_node_gradient_wire: WireFormat | None = None
    """Format in which they make the hop over `node`; gradient_wire if None."""

    quantize_threshold: int = 4096
    """Leaves with fewer elements (of a layer, where loops slice them) are not quantized."""

    unquantized: str | Sequence[str] = UNQUANTIZED
    """Regular expressions, searched in leaf paths: matching leaves are not quantized. The default
    finds embeddings and norms by their usual names. Leaves that stay gathered for the whole step
    (persistence_threshold) are not quantized either."""

    hpz_size: int | Literal["node"] = 1
    """Devices that share a secondary shard of each leaf, kept from forward to backward (hpZ), which
    then gathers among them only. "node": those of a node; 1: none is kept; else a divisor or a
    multiple of a node's devices. (zero_hpz_partition_size)"""

    secondary: Literal["compute", "wire"] = "compute"
    """Form of the secondary shard of a quantized leaf: dequantized, in the compute dtype, or as its
    wire: less memory, and backward dequantizes once more."""

    inter_node_gather: Literal["microbatch", "step"] = "microbatch"
    """How often leaves pass the hop over `node` in forward: in every micro-batch, or once in a
    step, before the first; then every secondary shard is kept through the step."""

    inter_node_reduce: Literal["microbatch", "step"] = "microbatch"
    """How often gradients do: in every micro-batch, or once in a step, after the last; then a
    device keeps 1/devices per node of the gradient, in float32, instead of 1/world."""

    weight_differences: WireFormat | None = None
    """Quantized leaves make the hop over `node` as the difference to a kept copy, in this format,
    once in a step (qWD). The copy, 1/devices per node of the leaves in the compute dtype, is the
    secondary shard and stays in the state. Needs hpz_size="node". (SDP4Bit, arXiv 2410.15526)"""

    error_feedback: Feedback | None = None
    """What the hop over `node` loses of a gradient is added to the next one. Needs
    inter_node_reduce="step" and a format on that hop."""

    accumulate: int = 1
    """Micro-batches per step; the batch's leading dim holds all of them.
    (gradient_accumulation_steps)"""

    micro_batch: int | None = None
    """Rows of one device's micro-batch, checked against each batch; None takes any.
    (train_micro_batch_size_per_gpu)"""

    offload: Offload = dataclasses.field(default_factory=Offload)
    """What of the state lives in the host's memory. (offload_optimizer, offload_param)"""

    optimizer: optax.GradientTransformation | None = None
    """What `make_step` takes where it is given no optimizer; AdamW if None. (optimizer, scheduler,
    gradient_clipping)"""

    unit_elements: int | None = None
    """Most elements gathered together; a leaf larger than that is a unit of its own. None: one
    repeated block of the model, else 4 Mi elements."""

    prefetch_bucket: int | None = None
    """Most elements gathered ahead of their use, the next unit's or the next turn's included. None:
    0 on CPUs, where a collective blocks anyway, and on other devices what holds the next unit.
    (stage3_prefetch_bucket_size)"""

    max_live_parameters: int = 0
    """Most elements kept gathered for a later use. (stage3_max_live_parameters)"""

    max_reuse_distance: int = 0
    """A leaf is kept for its next use if at most this many elements are gathered in between.
    (stage3_max_reuse_distance)"""

    persistence_threshold: int = 100_000
    """Leaves of at most this many elements are gathered once at the start of a step and kept whole
    until its end; master and optimizer state are split like any other's.
    (stage3_param_persistence_threshold)"""

    model_persistence_cap: int | None = None
    """Most elements of all such leaves together. (stage3_model_persistence_threshold)"""

    frozen: str | Sequence[str] = ()
    """Regular expressions, searched in leaf paths such as "h_0/attn/kernel": matching leaves get no
    gradient and no optimizer state."""

    init_loss_scale: float = 2.0**15
    """First loss scale of float16 computation. (initial_scale_power)"""

    loss_scale_window: int = 1000
    """Finite steps after which the loss scale doubles; it halves at every step that is not.
    (loss_scale_window)"""

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "gather_dtype", "reduce_dtype"):
            optional = name != "compute_dtype"
            object.__setattr__(self, name, dtype_name(name, getattr(self, name), optional))
        for name, least in (
            ("accumulate", 1),
            ("micro_batch", 1),
            ("unit_elements", 1),
            ("prefetch_bucket", 0),
            ("max_live_parameters", 0),
            ("max_reuse_distance", 0),
            ("persistence_threshold", 0),
            ("model_persistence_cap", 0),
            ("quantize_threshold", 0),
            ("loss_scale_window", 1),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if not self.init_loss_scale > 0:
            raise ValueError(f"init_loss_scale={self.init_loss_scale} must be above 0")
        for name in ("frozen", "unquantized"):
            object.__setattr__(self, name, patterns(name, getattr(self, name)))
        if not isinstance(self.offload, Offload):
            raise ValueError(f"offload={self.offload!r} is none; give a zeroxla.Offload")
        check_wires(self)

    @classmethod
    def zero3(cls, **options: Any) -> ZeroConfig:
        """Return plain ZeRO-3, the default: nothing is quantized, nothing kept."""
        return cls(**options)

    @classmethod
    def zeropp(cls, **options: Any) -> ZeroConfig:
        """Return ZeRO++ as its paper has it: 0.75 M between hosts.

        Weights travel in 8 bits, backward gathers inside the node, gradients travel in 4 bits on
        both hops; what is not quantized travels in bfloat16.

        Args:
          **options: fields of `ZeroConfig`, beside or instead of those.

        Source: ZeRO++, arXiv 2306.10209.
        """
        return cls(**{**_ZEROPP, "gradient_wire": WireFormat(bits=4), **options})

    @classmethod
    def zeropp_hq(cls, **options: Any) -> ZeroConfig:
        """Return the best quality at the bytes of `zeropp`, 0.75 M between hosts.

        Gradients are rotated; they travel in 8 bits inside the node, and in 4 between nodes.

        Args:
          **options: fields of `ZeroConfig`, beside or instead of those.

        Source: SDP4Bit, arXiv 2410.15526, section 3.2.
        """
        return cls(**{**_ZEROPP, **_TWO_LEVELS, **options})

    @classmethod
    def zeropp_min(cls, **options: Any) -> ZeroConfig:
        """Return the fewest bytes: 0.5 M between hosts, independent of micro-batches.

        As `zeropp_hq`, and weights travel between nodes as 4-bit differences to a kept copy.

        Args:
          **options: fields of `ZeroConfig`, beside or instead of those.

        Source: SDP4Bit, arXiv 2410.15526, section 3.1.
        """
        return cls(**{**_ZEROPP, **_TWO_LEVELS, **_DIFFERENCES, **options})

    @classmethod
    def from_deepspeed(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ZeroConfig:
        """Return what a DeepSpeed configuration asks for.

        What is not written in it keeps this class's default, not DeepSpeed's. One warning lists the
        keys that are written and have no effect here, or another one, each with the reason;
        `zeroxla.config.deepspeed.read` returns them instead.

        Args:
          source: the path of a JSON file, or what such a file holds.

        Raises:
          ValueError: the file is missing or no JSON object, a key is unknown (the nearest known one
            is named), or a value is of the wrong type, out of range or against another.
          NotImplementedError: the optimizer or the scheduler is not here.

        >>> ZeroConfig.from_deepspeed({"gradient_accumulation_steps": 4}).accumulate
        4
        """
        settings = read(source)
        if settings.ignored:
            warnings.warn(settings.warning(), stacklevel=2)
        return cls(**settings.options)

    def is_frozen(self, path: str) -> bool:
        """Return whether the leaf at `path` is frozen."""
        return any(re.search(pattern, path) for pattern in self.frozen)

    def is_unquantized(self, path: str) -> bool:
        """Return whether a pattern keeps the leaf at `path` unquantized."""
        return any(re.search(pattern, path) for pattern in self.unquantized)

    def unmatched(self, paths: Sequence[str]) -> dict[str, list[str]]:
        """Return the patterns, by option, that match none of `paths`; not those of a default."""
        given = {"frozen": self.frozen}
        if self.unquantized != UNQUANTIZED:
            given["unquantized"] = self.unquantized
        return {
            name: unused
            for name, patterns in given.items()
            if (unused := [p for p in patterns if not any(re.search(p, path) for path in paths)])
        }

    @property
    def wires(self) -> list[str]:
        """The options that quantize something."""
        return [name for name in WIRES if getattr(self, name) is not None]
