"""`memory_by_phase`: the bytes that a device holds in each phase of an iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zeroxla.offload.array_bytes import array_bytes_per_device
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.report import Report, format_bytes
from zeroxla.rlhf.loop import PHASES, Loop
from zeroxla.rlhf.objectives import batch_shapes, critic_shapes
from zeroxla.rlhf.states import States

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """Bytes of one device in a phase.

    Attributes:
      phase: generate, score or train.
      state_bytes: states of actor, critic and reference between phases, counted from live arrays.
      layout_bytes: the copy of a model that generates or scores, which is freed after the phase.
      temp_bytes: further bytes in the compiler's plan: caches, activations, gathered leaves,
        gradients.
    """

    phase: str
    state_bytes: int
    layout_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.layout_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhasesMemory(Report):
    """Bytes of one device in each phase; `print` it, or read `rows`."""

    rows: tuple[PhaseMemory, ...]

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        table = Table(title="Memory of one device, by phase", title_justify="left")
        table.add_column("phase")
        for name in ("states", "layout", "temporaries", "in all"):
            table.add_column(name, justify="right")
        for row in self.rows:
            sizes = (row.state_bytes, row.layout_bytes, row.temp_bytes, row.total_bytes)
            table.add_row(row.phase, *map(format_bytes, sizes))
        return table

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the figures by phase, for JSON."""
        return {
            row.phase: {
                name: getattr(row, name)
                for name in ("state_bytes", "layout_bytes", "temp_bytes", "total_bytes")
            }
            for row in self.rows
        }


def memory_by_phase(loop: Loop, states: States) -> PhasesMemory:
    """Report the bytes that a device holds in each phase.

    A phase may have several programs (reference and critic score, actor and critic train). They run
    one after another, so the one with the most memory counts.

    Args:
      loop: the loop that the states belong to.
      states: the states whose arrays are counted. Nothing is computed with them.

    Cost: each program of an iteration is compiled, unless it has run already.
    """
    settings = loop.settings
    held = array_bytes_per_device((states.actor, states.critic, states.reference))
    state_bytes = max(held.values(), default=0)
    rows = settings.rows
    scoring = [loop.reference_engine]
    if loop.critic_engine is not None:
        scoring.append(loop.critic_engine)
    training = [loop.actor.step.lower(states.actor, _zeros(batch_shapes(settings)))]
    if loop.critic is not None:
        training.append(loop.critic.lower(states.critic, _zeros(critic_shapes(settings))))
    generating = loop.engine.lower(rows, settings.prompt_length, max_new_tokens=settings.new_tokens)
    found = {
        "generate": [generating],
        "score": [engine.lower_logprobs(rows, settings.length) for engine in scoring],
        "train": training,
    }
    return PhasesMemory(
        rows=tuple(
            _phase(name, state_bytes, found[name], has_layout=name != "train") for name in PHASES
        )
    )


def _phase(
    phase: str, state_bytes: int, programs: Iterable[jax.stages.Lowered], *, has_layout: bool
) -> PhaseMemory:
    # The arguments of a training step are the states, which are counted already. The arguments of
    # the other programs are the layout, and some tokens.
    reports = [MemoryReport.of(lowered.compile()) for lowered in programs]
    found = [(x.argument_bytes if has_layout else 0, x.temp_bytes) for x in reports]
    layout, temp = max(found, key=sum)
    return PhaseMemory(phase=phase, state_bytes=state_bytes, layout_bytes=layout, temp_bytes=temp)


def _zeros(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}
