"""`ZeroConfig`: the options of a training setup, and its presets."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optax

from zeroxla.config.feedback import Feedback
from zeroxla.config.keywords import names_options
from zeroxla.config.offload import Offload
from zeroxla.config.outer import Outer
from zeroxla.config.presets import DIFFERENCES, TWO_LEVELS, ZEROPP, streaming
from zeroxla.config.rewrite import Rewrite
from zeroxla.config.settle import settle
from zeroxla.config.splits import Splits
from zeroxla.config.undecided import AUTO
from zeroxla.config.wire_checks import WIRES, check_wires
from zeroxla.config.wire_format import WireFormat

PERSISTENT = 100_000
"""Most elements of a persistent leaf, as in DeepSpeed."""

# Finds lookup tables and norms by the names that Flax and common models give them.
UNQUANTIZED = (r"(?i)(embed|wte|wpe|pos_emb|tok_emb|norm|(^|/)ln)",)


@names_options
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a model is sharded, gathered, reduced and stepped.

    Without options this is ZeRO-3. `zero3`, `zeropp`, `zeropp_hq` and `zeropp_min` are presets, and
    `diloco` and `streaming` for islands; each takes any field besides, which overrides its own.
    `from_deepspeed` reads a DeepSpeed configuration.

    The master copy of every leaf, the optimizer's arithmetic and all sums over devices are float32.
    Elements are counted as DeepSpeed counts them. Where DeepSpeed has the same option, its name
    stands in brackets.
    """

    compute_dtype: str = "float32"
    """Dtype in which the model computes: float32, bfloat16 or float16. Floating leaves of the batch
    are cast to it too. float16 brings dynamic loss scaling."""

    gather_dtype: str | None = None
    """Wire dtype of leaves that are not quantized. None means `compute_dtype`."""

    reduce_dtype: str | None = None
    """Wire dtype of gradients not quantized. None means float32. (communication_data_type)"""

    weight_wire: WireFormat | None = None
    """Format of gathered leaves on every hop (qwZ). None quantizes no leaf.
    (zero_quantized_weights)"""

    gradient_wire: WireFormat | None = None
    """Format of gradients on the hop over `device` (qgZ). None quantizes no gradient there.
    (zero_quantized_gradients)"""

    inter_node_gradient_wire: WireFormat | None = None
    """Format of gradients on the hop over `node`. None means `gradient_wire`."""

    quantize_threshold: int = 4096
    """Leaves with fewer elements are not quantized. Of a leaf that a loop slices, one layer
    counts."""

    unquantized: str | Sequence[str] = UNQUANTIZED
    """Regular expressions that are searched in leaf paths; matching leaves are not quantized. The
    default finds embeddings and norms by their usual names. Leaves that stay gathered for the whole
    step (persistence_threshold) are not quantized either."""

    hpz_size: int | Literal["node", "auto"] = 1
    """Number of devices that keep a leaf among them, as secondary shards, from forward to backward
    (hpZ). Backward then gathers among these devices only. "node" means the devices of a node, 1
    keeps no secondary shards; other values divide the devices of a node or are a multiple of them.
    With "auto" the budget of `memory` takes 1 or "node". (zero_hpz_partition_size)"""

    secondary: Literal["compute", "wire"] = "compute"
    """Form in which a quantized leaf's secondary shard is kept. "compute": dequantized, in the
    compute dtype. "wire": as it travels, which takes less memory, but backward dequantizes it once
    more. With weight_differences the kept copy is the secondary shard. Backward then dequantizes
    either way, and "wire" keeps besides what the copy was quantized to, which spares backward
    quantizing it again."""

    inter_node_gather: Literal["microbatch", "step"] = "microbatch"
    """When leaves cross nodes in forward. "microbatch": in every micro-batch. "step": once; every
    secondary shard is then kept through the step. That is before the first micro-batch or, if there
    is only one, when the leaf's unit is gathered; for leaves of loops and `jax.checkpoint` bodies
    it is always before."""

    inter_node_reduce: Literal["microbatch", "step"] = "microbatch"
    """When gradients cross nodes. "microbatch": in every micro-batch. "step": once, after the last
    one; each device then keeps 1/(devices per node) of the float32 gradient instead of 1/world. The
    only micro-batch of a step has nothing to wait for: its gradients cross unit by unit, but those
    with error_feedback."""

    weight_differences: WireFormat | None = None
    """Format of the differences that cross nodes instead of quantized leaves, once in a step (qWD).
    They are taken to a kept copy: 1/(devices per node) of the leaves in the compute dtype, which is
    the secondary shard and stays in the state. They are sent when `inter_node_gather="step"` sends
    leaves. Needs hpz_size="node". None sends leaves as they are. (SDP4Bit, arXiv 2410.15526)"""

    error_feedback: Feedback | None = None
    """Adds to each gradient what the hop over `node` lost of the gradient before. Needs
    inter_node_reduce="step" and a quantized gradient on that hop. None drops the error."""

    accumulate: int | Literal["auto"] = 1
    """Number of micro-batches in a step; the batch's leading dim holds all of them. With "auto" the
    budget of `memory` takes one that divides the rows. (gradient_accumulation_steps)"""

    micro_batch: int | None = None
    """Number of rows in one device's micro-batch, which each batch is checked against. None takes
    any number. (train_micro_batch_size_per_gpu)"""

    offload: Offload = dataclasses.field(default_factory=Offload)
    """Parts of the state that live in the host's memory or on its disk. (offload_optimizer,
    offload_param)"""

    splits: Splits | None = None
    """Pins what the axes tensor, context and expert split, by name. None leaves it to a search."""

    rewrite: Rewrite | bool | None = None
    """What of the model's trace is computed in a form that keeps less; True means `Rewrite()`."""

    memory: str | int | None = None
    """Memory of a device that a step may take: bytes, a text such as "24GB", or "device" for all
    that it has. What backward reads is kept, computed again or sent to the host so that it fits,
    and gathered leaves stay for backward where there is room. None keeps all that backward reads,
    and gathers again."""

    remat: Literal["respect", "replace"] = "respect"
    """What becomes of `jax.checkpoint` in the model under `memory`. "respect": what it computes
    again stays so. "replace": the budget alone decides."""

    outer: Outer | None = None
    """How islands exchange what they have learned, for `zeroxla.Island`; a step trains alone."""

    optimizer: optax.GradientTransformation | None = None
    """Optimizer of a `make_step` that is given none. None means AdamW. (optimizer, scheduler)"""

    owners: bool = True
    """Whether one device computes each matrix that the optimizer needs whole, as Muon does."""

    unit_elements: int | None = None
    """Most elements that are gathered together; a larger leaf is a unit of its own. None means one
    repeated block of the model, or 4 Mi elements where nothing repeats."""

    prefetch_bucket: int | None = None
    """Largest number of elements that are gathered ahead of their use, the next unit or the next
    turn of a loop included. None means 0 on CPUs, where a collective blocks anyway, and room for
    the next unit on other devices; with `memory` 0 there too, if the room is worth more.
    (stage3_prefetch_bucket_size)"""

    max_live_parameters: int | None = None
    """Most elements that stay gathered for a later use. None means 0; with `memory`, and if
    `max_reuse_distance` is None too, as many as fit and save time. (stage3_max_live_parameters)"""

    max_reuse_distance: int | None = None
    """A leaf stays gathered for its next use if at most this many elements are gathered in between.
    None means 0, or is as for `max_live_parameters`. (stage3_max_reuse_distance)"""

    persistence_threshold: int | None = None
    """Leaves of at most this many elements are gathered once at the start of a step and kept whole
    until its end. Their master and optimizer state are split like any other leaf's. None means
    100,000. With quantized wires, which such leaves do not have, None means less in a small model:
    a thousandth of its elements, or what `quantize_threshold` leaves out if that is more.
    (stage3_param_persistence_threshold)"""

    model_persistence_cap: int | None = None
    """Largest number of elements of all such leaves. (stage3_model_persistence_threshold)"""

    frozen: str | Sequence[str] = ()
    """Regular expressions searched in leaf paths such as "h_0/attn/kernel"; matching leaves get no
    gradient and no optimizer state."""

    init_loss_scale: float = 2.0**15
    """Loss scale of the first float16 step. (initial_scale_power)"""

    loss_scale_window: int = 1000
    """Number of finite steps after which the loss scale doubles. It halves at every step that is
    not finite. (loss_scale_window)"""

    @property
    def num_micro_batches(self) -> int:
        """`accumulate`, or 1 as long as it is undecided."""
        return 1 if self.accumulate == AUTO else self.accumulate

    @property
    def may_reuse_leaves(self) -> bool:
        """Whether a memory budget decides which leaves stay gathered for backward."""
        limits = self.max_live_parameters, self.max_reuse_distance
        return self.memory is not None and limits == (None, None)

    def largest_persistent(self, elements: int) -> int:
        """Return the most elements of a leaf that stays gathered, in a model of `elements`."""
        if self.persistence_threshold is not None:
            return self.persistence_threshold
        if not self.wires:
            return PERSISTENT
        # What is too small to be quantized may stay: to gather it again would save no bytes.
        return min(PERSISTENT, max(elements // 1000, self.quantize_threshold - 1, 0))

    def __post_init__(self) -> None:
        settle(self)
        check_wires(self)

    @classmethod
    def zero3(cls, **options: Any) -> ZeroConfig:
        """Return plain ZeRO-3, the default: it quantizes nothing and keeps no secondary shards."""
        return cls(**options)

    @classmethod
    def zeropp(cls, **options: Any) -> ZeroConfig:
        """Return ZeRO++ as its paper has it: 0.75 M between hosts, M the leaves' bytes in 16 bits.

        Weights travel in 8 bits, backward gathers inside the node, and gradients travel in 4 bits
        on both hops. Leaves and gradients that are not quantized travel in bfloat16.

        Source: ZeRO++, arXiv 2306.10209.
        """
        return cls(**{**ZEROPP, "gradient_wire": WireFormat(bits=4), **options})

    @classmethod
    def zeropp_hq(cls, **options: Any) -> ZeroConfig:
        """Return the preset of the best quality at the bytes of `zeropp`, 0.75 M between hosts.

        Gradients are rotated. They travel in 8 bits inside the node and in 4 bits between nodes.

        Source: SDP4Bit, arXiv 2410.15526, section 3.2.
        """
        return cls(**{**ZEROPP, **TWO_LEVELS, **options})

    @classmethod
    def zeropp_min(cls, **options: Any) -> ZeroConfig:
        """Return the preset of the fewest bytes: 0.5 M between hosts, however many micro-batches.

        It is `zeropp_hq`, but weights travel between nodes as 4-bit differences to a kept copy.

        Source: SDP4Bit, arXiv 2410.15526, section 3.1.
        """
        return cls(**{**ZEROPP, **TWO_LEVELS, **DIFFERENCES, **options})

    @classmethod
    def diloco(cls, *, every: int = 100, **options: Any) -> ZeroConfig:
        """Return ZeRO-3 inside islands, which exchange all differences in float32 after `every`
        steps.

        Source: DiLoCo, arXiv 2311.08105.
        """
        return cls(**{"outer": Outer(every=every), **options})

    @classmethod
    def streaming(cls, *, every: int = 100, **options: Any) -> ZeroConfig:
        """Return ZeRO-3 inside islands, which exchange differences in 4 bits, a tenth of them at a
        time, while training goes on. Each tenth is exchanged after `every` steps.

        Source: Streaming DiLoCo, arXiv 2501.18512.
        """
        return cls(**{"outer": streaming(every), **options})

    @classmethod
    def from_deepspeed(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        auto: Mapping[str, Any] | None = None,
    ) -> ZeroConfig:
        """Return the options that a DeepSpeed configuration asks for.

        A key that it does not have keeps this class's default, not DeepSpeed's. One warning lists
        the keys that have no effect here, or another effect, each with the reason. To get these
        keys returned instead, call `zeroxla.config.deepspeed.read`.

        Args:
          source: the path of a JSON file, or a mapping with the content of one.
          auto: the values of keys that are written "auto", by dotted name, such as
            {"scheduler.params.total_num_steps": 1000}. Others that are "auto" count as not written.

        Raises:
          ValueError: the file is missing or holds no JSON object, a key is nearly a known one (the
            message names it), or a value has the wrong type, is out of range or contradicts
            another. One message tells all problems.
          NotImplementedError: zeroxla lacks the optimizer or the scheduler.

        >>> ZeroConfig.from_deepspeed({"gradient_accumulation_steps": 4}).accumulate
        4
        """
        from zeroxla.config.deepspeed.reader import read  # here: few call this method

        settings = read(source, auto=auto)
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
        """Return, by option, the patterns that match none of `paths`; defaults are not checked."""
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
        """The names of the options that quantize something."""
        return [name for name in WIRES if getattr(self, name) is not None]
