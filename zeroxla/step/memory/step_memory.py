"""`StepMemory`: the memory of a device over one step, by what it consists of."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from zeroxla.fetch.unit_names import unit_names
from zeroxla.mesh.axes import platform_of
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.live.kinds import GATHERED, GRADIENTS, OTHERS, RESIDUALS, SUB_GROUPS
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import Moment, live_bytes, peak_bytes
from zeroxla.program.live.residents import Resident, ResidentLabels, by_kind, largest_first
from zeroxla.program.paths import leaf_path
from zeroxla.program.phases import phase_of
from zeroxla.program.report import Report, format_bytes, table_of_parts
from zeroxla.step.memory.step_program import StepProgram
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState
from zeroxla.wire.leaves import Layout

if TYPE_CHECKING:
    from rich.table import Table

PARAMETERS, OPTIMIZER, WIRES, OTHER_STATE = (
    "parameters",
    "optimizer state",
    "memory of wires",
    "other state and batch",
)
"""The kinds of what is there between steps, the batch included."""
STATE = (PARAMETERS, OPTIMIZER, WIRES, OTHER_STATE)
TEMPORARIES = (GATHERED, GRADIENTS, RESIDUALS, OTHERS, SUB_GROUPS)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """The temporaries of a device while one equation runs.

    Attributes:
      phase: "forward", "backward" or "update".
      num_bytes: their bytes by kind.
    """

    phase: str
    num_bytes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory(Report):
    """The memory of one device over a step, from the live ranges of the step's trace.

    Attributes:
      residents: what the device holds at the peak, the largest first: arrays of the state and of
        the batch, and temporaries.
      curve: the temporaries at one equation after another, without those that are fused into others
        or only rename. Of a loop, one turn is there, and of micro-batches one. The update of a
        state that is on the device follows its gradients and is one point.
      in_update: whether the peak is in the update of an offloaded state.
    """

    residents: tuple[Resident, ...]
    curve: tuple[CurvePoint, ...]
    in_update: bool = False

    @staticmethod
    def of(programs: Programs, state: TrainState, batch: Any) -> StepMemory:
        """Trace a step and follow its values.

        Args:
          programs: the step's functions.
          state, batch: its arguments, or their shapes with shardings.

        Cost: one trace, a second or two for models of a hundred layers.
        """
        traced, layout = StepProgram.of(programs, state, batch), programs.layout(state)
        labels = ResidentLabels(
            flow=traced.flow(programs, state),
            leaf_names=[leaf.path for leaf in layout],
            units=units_of(programs, layout, state, batch),
        )
        scope = Scope.of(traced.local, platform_of(programs.mesh))
        live = live_bytes(scope, labels, curve=True)
        gradients = _gradients(programs, layout)
        arriving = traced.sub_group_bytes
        update = Counter({GRADIENTS: by_kind(gradients)[GRADIENTS], SUB_GROUPS: arriving})
        in_update = arriving > 0 and update.total() > live.most.total()
        found = largest_first(live.most)
        if in_update:
            groups = Resident(kind=SUB_GROUPS, equation="", shape="", num_bytes=arriving)
            found = [*gradients, groups]
        held = [*_of_state(state, batch), *found]
        return StepMemory(
            residents=tuple(sorted(held, key=lambda resident: -resident.num_bytes)),
            curve=(*_points(live.curve), CurvePoint(phase=UPDATE, num_bytes=dict(update))),
            in_update=in_update,
        )

    @property
    def total_bytes(self) -> int:
        """The bytes that the device holds at the peak."""
        return sum(resident.num_bytes for resident in self.residents)

    @property
    def temporary_bytes(self) -> int:
        """Those of them that it holds only within a step."""
        return self.total_bytes - self.state_bytes

    @property
    def state_bytes(self) -> int:
        """The bytes that it holds between steps, the batch included."""
        return sum(x.num_bytes for x in self.residents if x.kind in STATE)

    def parts(self) -> dict[str, int]:
        """Return the bytes at the peak by name; they add up to the total."""
        found = by_kind(self.residents)
        names = TEMPORARIES if self.in_update else TEMPORARIES[:-1]
        return {name: found[name] for name in (*STATE, *names)}

    def largest(self, num: int = 10) -> tuple[Resident, ...]:
        """Return the largest residents at the peak."""
        return self.residents[:num]

    def gathered_by_unit(self) -> dict[str, int]:
        """Return the bytes of gathered leaves at the peak by unit, the most first."""
        return _grouped((x.unit or x.name, x) for x in self.residents if x.kind == GATHERED)

    def residuals_by_line(self) -> dict[str, int]:
        """Return the bytes of residuals at the peak by the line of the model (the equation and its
        scope where no line is known), the most first."""
        return _grouped((x.line or x.name, x) for x in self.residents if x.kind == RESIDUALS)

    def tables(self) -> list[Table]:
        """Return the parts at the peak, and the ten largest residents."""
        from rich.table import Table

        largest = Table(title="The largest at the peak", title_justify="left")
        for name in ("what", "kind", "arrays", "bytes", "unit", "line"):
            largest.add_column(name, justify="right" if name == "bytes" else "left")
        for x in self.largest():
            arrays = f"{x.count} x {x.shape}" if x.count > 1 else x.shape
            largest.add_row(x.name, x.kind, arrays, format_bytes(x.num_bytes), x.unit, x.line)
        return [self.table(), largest]

    def table(self) -> Table:
        """Return the table of the parts at the peak."""
        return table_of_parts("One device at the peak of a step", self.parts())

    def notes(self) -> list[str]:
        """Return where the figures come from."""
        return [
            "The state is exact. Temporaries follow from the live ranges of the step's trace; the "
            "compiler's own figure is that of inspect.memory(step.lower(state, batch).compile())."
        ]


def measured(programs: Programs, state: TrainState, batch: Any) -> tuple[int, int]:
    """Return `total_bytes` and `temporary_bytes` of a step without naming what they consist of; the
    arguments are those of `StepMemory.of`."""
    traced, layout = StepProgram.of(programs, state, batch), programs.layout(state)
    peak = peak_bytes(Scope.of(traced.local, platform_of(programs.mesh))).total()
    if traced.sub_group_bytes:
        gradients = by_kind(_gradients(programs, layout)).total()
        peak = max(peak, gradients + traced.sub_group_bytes)
    return by_kind(_of_state(state, batch)).total() + peak, peak


def _grouped(pairs: Iterable[tuple[str, Resident]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, resident in pairs:
        found[name] += resident.num_bytes
    return dict(found.most_common())


def _of_state(state: TrainState, batch: Any) -> list[Resident]:
    """Return the arrays of a state and a batch that are on the device."""
    others = (state.model_state, state.step, state.loss_scale)
    trees = {
        PARAMETERS: state.params,
        OPTIMIZER: state.opt_state,
        WIRES: state.wire_state,
        OTHER_STATE: (others, batch),
    }
    found = []
    for kind, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if num_bytes := shard_bytes(x):
                shape = ",".join(map(str, x.sharding.shard_shape(x.shape)))
                name = leaf_path(path) if kind != OTHER_STATE else leaf_path(path[1:])
                found.append(
                    Resident(
                        kind=kind,
                        equation="",
                        shape=f"{x.dtype}[{shape}]",
                        leaves=(name,),
                        num_bytes=num_bytes,
                    )
                )
    return found


def _gradients(programs: Programs, layout: Layout) -> list[Resident]:
    """Return a device's shards of all gradients, in float32."""
    shapes = {
        leaf.path: leaf.placement.shard_shape(programs.mesh) for leaf in layout if not leaf.frozen
    }
    return [
        Resident(
            kind=GRADIENTS,
            equation="shard",
            shape=f"float32[{','.join(map(str, shape))}]",
            leaves=(path,),
            num_bytes=4 * math.prod(shape),
        )
        for path, shape in shapes.items()
    ]


def units_of(programs: Programs, layout: Layout, state: TrainState, batch: Any) -> list[str]:
    """Return the unit with which each leaf is gathered."""
    if programs.pipeline is not None:
        return [""] * len(layout.leaves)
    plan = programs.plan(layout, state.model_state, batch, state.key)
    names, values = unit_names(plan), iter(plan.leaves)
    return [names.get(next(values), "") if leaf.fetched else "persistent" for leaf in layout]


def _points(curve: Iterable[Moment]) -> list[CurvePoint]:
    """Return the points of a curve: of forward, and after its first equation of backward."""
    phase, found = FORWARD, []
    for moment in curve:
        of_path = phase_of(moment.path, "")
        if of_path.startswith(BACKWARD) or of_path == "reduce":
            phase = BACKWARD
        found.append(CurvePoint(phase=phase, num_bytes=dict(moment.num_bytes)))
    return found


def largest_in_words(memory: StepMemory, num: int = 3) -> str:
    """Return the largest residents at the peak in words."""
    found = []
    for x in memory.largest(num):
        where = f" ({x.line})" if x.line else ""
        shape = f", {x.count} x {x.shape}" if x.count > 1 else f", {x.shape}" if x.shape else ""
        found.append(f"{format_bytes(x.num_bytes)} of {x.kind}: {x.name}{where}{shape}")
    return "; ".join(found)
