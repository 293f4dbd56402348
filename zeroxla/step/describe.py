"""`Description`: the table of leaves that `step.describe()` returns."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import Mesh

from zeroxla.config.outer import Outer
from zeroxla.fetch.segments import FetchPlan
from zeroxla.fetch.unit_names import OF_A_LOOP, unit_names
from zeroxla.frontend.rewrite.report import RewriteReport
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.offload.memory_kinds import Place
from zeroxla.program.report import Report
from zeroxla.split.axis_report import AxisReport
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.owners.owners_report import OwnersReport
from zeroxla.step.state import TrainState
from zeroxla.wire.leaves import Layout, Leaf
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import AS_STORED

if TYPE_CHECKING:
    from rich.table import Table

    from zeroxla.step.programs import Programs
    from zeroxla.step.state_shapes import StateShapes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafRow:
    """One leaf, and the bytes of it on one device.

    Attributes:
      path: the leaf's name.
      shape: the leaf's natural shape.
      placement: the leaf's placement, in words.
      unit: the name of the unit with which the leaf is gathered.
      wires: the formats in which its weights and its gradient travel.
      shard_bytes: bytes of its shard, which is float32, or a frozen leaf's wire.
      secondary_bytes: bytes of its secondary shard; 0 if none is kept.
      gradient_bytes: bytes of its float32 gradient while micro-batches add to it.
    """

    path: str
    shape: tuple[int, ...]
    placement: str
    unit: str
    wires: str
    shard_bytes: int
    secondary_bytes: int
    gradient_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description(Report):
    """The table of leaves. `print` it, or read `rows`.

    Attributes:
      rows: one row per leaf.
      mesh: the mesh, in words.
      optimizer: bytes of one device's optimizer state on the device, on the host and on disk.
      secondary_on_host: whether secondary shards are in the host's memory.
      updated_on: where arrays on the host are updated: on the device, or on the host.
      axes: what is split over each axis that splits the work on one row.
      owners: the matrices that the update needs whole, and that one device each computes; None if
        there are none.
      rewrites: what was rewritten in the model's trace; None without the option.
      memory: what was decided so that the step fits into a memory; None without the option, or
        before the first step.
      outer: how islands exchange; None if the step trains by itself.
    """

    rows: tuple[LeafRow, ...]
    mesh: str
    optimizer: Mapping[str, int]
    secondary_on_host: bool = False
    updated_on: Literal["device", "host"] = "device"
    axes: tuple[AxisReport, ...] = ()
    owners: OwnersReport | None = None
    rewrites: RewriteReport | None = None
    memory: MemoryFit | None = None
    outer: Outer | None = None

    def tables(self) -> list[Table]:
        """Return the table of leaves, those of the axes that split the work on one row, and those
        of owned matrices and of rewrites."""
        return [self.table(), *(table for other in self._others for table in other.tables())]

    def notes(self) -> list[str]:
        """Return the sentences of the other reports, and the one about islands."""
        islands = [] if self.outer is None else [self.outer.sentence]
        return islands + [note for other in self._others for note in other.notes()]

    @property
    def _others(self) -> list[Report]:
        return [
            *self.axes,
            *(x for x in (self.owners, self.rewrites, self.memory) if x is not None),
        ]

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameters that one device stores."""
        return sum(row.shard_bytes for row in self.rows)

    @property
    def secondary_bytes(self) -> int:
        """Bytes of secondary shards that one device keeps when all are there."""
        return sum(row.secondary_bytes for row in self.rows)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of float32 gradients that one device adds up."""
        return sum(row.gradient_bytes for row in self.rows)

    @property
    def num_parameters(self) -> int:
        """Elements of all leaves. A leaf that is stored as a wire counts its bytes."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def largest_unit(self) -> int:
        """Elements of the largest unit that is whole at a time. A loop's unit counts one turn."""
        sizes: Counter[str] = Counter()
        for row in self.rows:
            turns = row.shape[0] if row.unit.endswith(OF_A_LOOP) else 1
            sizes[row.unit] += math.prod(row.shape) // turns
        return max(sizes.values(), default=0)

    @property
    def units(self) -> tuple[str, ...]:
        """The units, in order of first use."""
        return tuple(dict.fromkeys(row.unit for row in self.rows))

    def _optimizer_in_words(self) -> str:
        on_host = f" on the host, updated on the {self.updated_on}"
        names = {"device": "", "host": on_host, "disk": " on disk"}
        found = [f"{n:,} bytes{names[place]}" for place, n in self.optimizer.items() if n]
        return ", ".join(found) or "0 bytes"

    def table(self) -> Table:
        """Return the table for a rich console."""
        kinds = "float32 and wires" if any(r.wires == AS_STORED for r in self.rows) else "float32"
        where = " on the host" if self.secondary_on_host else ""
        from rich.table import Table

        title = (
            f"{self.num_parameters:,} parameters on {self.mesh}\n"
            f"a device: {self.shard_bytes:,} bytes of {kinds}, {self.secondary_bytes:,} of "
            f"secondary shards{where}, {self.gradient_bytes:,} of gradients\n"
            f"the optimizer's state of a device: {self._optimizer_in_words()}"
        )
        table = Table(title=title, min_width=max(map(len, title.splitlines())))
        # Where there is little room, paths and words take more lines, and numbers stay whole.
        numbers = ["shard bytes"]
        if self.secondary_bytes:
            numbers.append("secondary shard")
        table.add_column("leaf", overflow="fold")
        table.add_column("shape", no_wrap=True)
        for name in ("placement", "unit", "wires"):
            table.add_column(name, overflow="fold")
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            copy = f"{row.secondary_bytes:,}" if row.secondary_bytes else "-"
            held = (f"{row.shard_bytes:,}", copy)[: len(numbers)]
            table.add_row(row.path, shape, row.placement, row.unit, row.wires, *held)
        return table


def describe_step(
    programs: Programs, shapes: StateShapes, memory: MemoryFit | None = None
) -> Report:
    """Return the report on a step: the table of leaves, or of stages if it has some.

    Args:
      programs: the step's functions.
      shapes: the shapes of its states.
      memory: what was decided so that it fits into a memory; None without a budget.

    Raises:
      ValueError: the model has not been traced.
    """
    traced = shapes.traced
    if traced is None:
        raise ValueError("nothing to describe yet; call step.init or step.abstract_state first")
    state = shapes.placed(shapes.decide(traced.key, traced.batch))
    layout = programs.layout_of(traced.params, traced.placements)
    updated_on = programs.config.offload.update
    inputs = layout, traced.model_state, traced.batch, traced.key
    outer = programs.config.outer
    with programs.tracing():
        owners = programs.describe_owners(state)
    if programs.pipeline is not None:
        at_rest = stored_in_words(state, programs.mesh, updated_on)
        at_rest += [owners.sentence] if owners else []
        at_rest += [outer.sentence] if outer else []
        return programs.describe_stages(*inputs, at_rest)
    found = describe(layout, programs.plan(*inputs), programs.wiring, state.opt_state, updated_on)
    axes = () if programs.axes is None else programs.axes.newest.reports()
    return dataclasses.replace(
        found, axes=axes, owners=owners, rewrites=programs.rewrites, memory=memory, outer=outer
    )


def describe(
    layout: Layout,
    plan: FetchPlan,
    wiring: Wiring,
    opt_state: Any,
    updated_on: Literal["device", "host"] = "device",
) -> Description:
    """Make the table of a model's leaves.

    Args:
      layout: the leaves.
      plan: the fetch plan of a training step.
      wiring: how the leaves travel.
      opt_state: the shapes of the optimizer's state.
      updated_on: where arrays on the host are updated.
    """
    collectives = wiring.collectives
    units = unit_names(plan)
    values = iter(plan.leaves)
    rows = []
    for leaf in layout:
        placement = leaf.placement
        if leaf.fetched:
            unit = units.get(next(values), "unused")
        else:
            unit = "kept whole" if leaf.placement.dim is None else "persistent"
        where = "whole on every device"
        part = dataclasses.replace(leaf, placement=placement.of_part)
        world = collectives.hops.over(placement.axes).world if leaf.is_split else 1
        if placement.dim is not None:
            where = f"dim {placement.dim} over {world}"
            where += f" (+{placement.pad} zeros)" if placement.pad else ""
            if placement.memory is not None:
                where += ", on disk" if placement.is_on_disk else ", on the host"
        rows.append(
            LeafRow(
                path=leaf.path,
                shape=placement.shape,
                placement=where
                + "".join(f", {p.axis}: dim {p.dim} in {p.length}" for p in placement.parts)
                + (", frozen" if leaf.frozen else ""),
                unit=unit,
                wires=_wires(part, wiring),
                shard_bytes=(1 if leaf.is_wire else 4)
                * (math.prod(placement.part_shape(world)) if leaf.is_split else leaf.elements),
                secondary_bytes=wiring.secondary_bytes(part),
                gradient_bytes=wiring.gradient_bytes(part),
            )
        )
    words = f"{collectives.hops.nodes} node(s) x {collectives.hops.devices} device(s)"
    places: tuple[Place, ...] = ("device", "host", "disk")
    optimizer = {place: shard_bytes(opt_state, place=place) for place in places}
    return Description(
        rows=tuple(rows),
        mesh=words,
        optimizer=optimizer,
        updated_on=updated_on,
        secondary_on_host=collectives.gathers.secondary_on_host,
    )


def stored_in_words(
    state: TrainState, mesh: Mesh, updated_on: Literal["device", "host"]
) -> list[str]:
    """Return sentences on what a device of a pipeline stores between steps, and who updates it.

    Args:
      state: the state, or its shapes with shardings.
      mesh: the mesh, with stages.
      updated_on: where arrays on the host are updated.
    """
    by_stage = [p.stage_dim is not None for p in state.placements[0]]
    leaves = jax.tree.leaves(state.params)
    own = [x for x, mine in zip(leaves, by_stage, strict=True) if mine]
    rest = [x for x, mine in zip(leaves, by_stage, strict=True) if not mine]
    places: tuple[Place, ...] = ("device", "host", "disk")
    sizes = {place: shard_bytes((state.params, state.opt_state), place=place) for place in places}
    words = {"device": "in its own memory", "host": "in the host's", "disk": "on the host's disk"}
    stored = " and ".join(f"{n:,} bytes {words[place]}" for place, n in sizes.items() if n)
    num_own, num_rest = (sum(shard_bytes(x, place=p) for p in places) for x in (own, rest))
    where = "on the host" if sizes["host"] and updated_on == "host" else "on the device"
    return [
        f"Between steps a device stores parameters and optimizer state: {stored or '0 bytes'}.",
        f"{num_own:,} bytes of its parameters belong to layers of its own stage, and {num_rest:,} "
        f"to leaves that all {mesh.size} devices share.",
        f"Each device updates what it stores, {where}; no stage waits for another one's update.",
    ]


def _wires(leaf: Leaf, wiring: Wiring) -> str:
    if leaf.is_split or leaf.is_wire:
        return wiring.route(leaf).words
    return "float32"
