"""The settings that hide or remove what a step waits for: one small rule for each.

A rule speaks only where its setting is not set already, and only where it would change something on
this mesh. The first rule that speaks gives the advice, so those that change no number come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from zeroxla.config.wire_format import WireFormat
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.planning.bottleneck import REMEDIES
from zeroxla.planning.explain.link_uses import LinkUse
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE, Target

PERSISTENT = "persistent"
"""The unit of leaves that are gathered once, at the start of a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting that would hide or remove a stall.

    Attributes:
      text: the setting and what it does, as a sentence.
      changes: the fields of `ZeroConfig` with their new values; empty if the setting is none of
        its.
    """

    text: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The step that advice is for.

    Attributes:
      config: its options.
      target: the devices.
      weights: how often a stage of a pipeline gathers its leaves; empty without stages.
      unit_elements: the elements of its largest unit; 0 if it is not known.
    """

    config: ZeroConfig
    target: Target
    weights: str = ""
    unit_elements: int = 0

    def has(self, axis: str) -> bool:
        """Return whether the mesh has several devices along an axis."""
        return self.target.mesh_shape.get(axis, 1) > 1

    @property
    def overlaps(self) -> bool:
        """Whether gathers can run beside computation."""
        return self.target.device.overlaps

    def is_latency(self, use: LinkUse) -> bool:
        """Return whether most of a collective's time is latency, which fewer bytes leave as it
        is."""
        target, lane = self.target, use.lane
        if lane not in target.mesh_shape or not use.count:
            return False
        return target.seconds(lane, use.kind, 0) * use.count > use.seconds / 2


Rule = Callable[[LinkUse, Case], Remedy | None]


def remedy_for(use: LinkUse, case: Case) -> Remedy | None:
    """Return the setting that would hide or shorten what a step waits for; None if there is none.

    At the ends of a step nothing runs beside a collective, so nothing hides it there.
    """
    return next((found for rule in RULES if (found := rule(use, case))), None)


def run_ahead(use: LinkUse, case: Case) -> Remedy | None:
    """A gather may begin before the unit in front of it is done. Without that, reduces and gathers
    wait for each other, too."""
    bucket = case.config.prefetch_bucket
    if bucket is None or not case.overlaps or use.unit == PERSISTENT:
        return None
    if bucket == 0 and (use.is_gather or use.phase == "reduce"):
        text = "prefetch_bucket=None: gather the next unit while the present one computes"
        return Remedy(text=text, changes={"prefetch_bucket": None})
    if use.is_gather and 0 < bucket < case.unit_elements:
        text = (
            f"prefetch_bucket={case.unit_elements}: {bucket} elements leave no room for a unit "
            "ahead"
        )
        return Remedy(text=text, changes={"prefetch_bucket": case.unit_elements})
    return None


def not_persistent(use: LinkUse, case: Case) -> Remedy | None:
    """Leaves that are gathered all together can travel with their units."""
    if use.unit != PERSISTENT or case.config.persistence_threshold == 0:
        return None
    text = (
        "persistence_threshold=0: gather small leaves with their units, beside computation, "
        "instead of all of them at the start of a step"
    )
    return Remedy(text=text, changes={"persistence_threshold": 0})


def stages_keep_leaves(use: LinkUse, case: Case) -> Remedy | None:
    """The stages of a pipeline can keep their leaves through the step."""
    if case.weights != "tick" or not (use.is_gather or use.phase == "reduce"):
        return None
    return Remedy(text='make_step(weights="step"): a stage gathers its leaves once in a step')


def gather_once(use: LinkUse, case: Case) -> Remedy | None:
    """Of several micro-batches only the first needs leaves from other nodes."""
    config = case.config
    once = config.inter_node_gather == "step" or config.num_micro_batches == 1
    if not use.is_gather or use.lane != NODE or once or not case.has(DEVICE):
        return None
    text = (
        'inter_node_gather="step" with hpz_size="node": leaves cross nodes once in a step, not in '
        "each micro-batch"
    )
    return Remedy(text=text, changes={"inter_node_gather": "step", "hpz_size": "node"})


def secondary_shards(use: LinkUse, case: Case) -> Remedy | None:
    """Backward can gather inside the node."""
    is_backward = use.phase == "backward gather"
    if not is_backward or use.lane != NODE or case.config.hpz_size != 1 or not case.has(DEVICE):
        return None
    text = 'hpz_size="node": keep secondary shards, so that backward gathers inside the node'
    return Remedy(text=text, changes={"hpz_size": "node"})


def reduce_once(use: LinkUse, case: Case) -> Remedy | None:
    """Of several micro-batches the sum alone can cross nodes."""
    config = case.config
    once = config.inter_node_reduce == "step" or config.num_micro_batches == 1
    if use.phase != "reduce" or use.lane != NODE or once:
        return None
    text = 'inter_node_reduce="step": gradients cross nodes once, after the last micro-batch'
    return Remedy(text=text, changes={"inter_node_reduce": "step"})


def fewer_gradient_bytes(use: LinkUse, case: Case) -> Remedy | None:
    """Gradients can be quantized."""
    config = case.config
    if use.phase != "reduce" or use.lane not in (NODE, DEVICE) or case.is_latency(use):
        return None
    wire = WireFormat(bits=8)
    is_node = use.lane == NODE
    set_already = config.gradient_wire or (is_node and config.inter_node_gradient_wire)
    if set_already:
        return None
    name = "inter_node_gradient_wire" if is_node else "gradient_wire"
    text = f"{name}=WireFormat(bits=8): a quarter of the bytes of float32 gradients, rounded"
    return Remedy(text=text, changes={name: wire})


def fewer_weight_bytes(use: LinkUse, case: Case) -> Remedy | None:
    """Gathered leaves can be quantized."""
    if not use.is_gather or case.config.weight_wire or use.lane not in (NODE, DEVICE):
        return None
    if use.unit == PERSISTENT or case.is_latency(use):
        return None
    text = "weight_wire=WireFormat(bits=8): leaves travel in a byte for each number, rounded"
    return Remedy(text=text, changes={"weight_wire": WireFormat(bits=8)})


def owners(use: LinkUse, case: Case) -> Remedy | None:
    """One device can compute each matrix that the optimizer needs whole."""
    if use.phase != "update" or not use.kind or case.config.owners:
        return None
    text = "owners=True: one device computes each matrix that the optimizer needs whole"
    return Remedy(text=text, changes={"owners": True})


def less_offload(use: LinkUse, case: Case) -> Remedy | None:
    """Less can be moved to and from the host, and less be computed there."""
    if use.lane not in (HOST, HOST_UPDATE, DISK):
        return None
    return Remedy(text=REMEDIES[use.lane])


RULES: tuple[Rule, ...] = (
    run_ahead,
    not_persistent,
    stages_keep_leaves,
    gather_once,
    secondary_shards,
    reduce_once,
    owners,
    fewer_gradient_bytes,
    fewer_weight_bytes,
    less_offload,
)
"""The rules, those first that leave all numbers as they are."""
