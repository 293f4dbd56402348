"""What islands cost: the outer state of a device, and the exchanges between islands."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from zeroxla.config.outer import Outer
from zeroxla.mesh.machines import Link, Machines
from zeroxla.planning.exchange_time import ExchangeTime, Piece
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.islands.exchange_bytes import ExchangeBytes
from zeroxla.step.islands.make_programs import programs_of
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

if TYPE_CHECKING:
    from rich.table import Table

GOAL = 0.95
"""The share of the time in which islands should train; a plan says which link that takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Islands:
    """The islands of a run, each with the planned mesh.

    Attributes:
      num: the number of islands.
      link: the link of an island to the others, which all its devices share: a name in the tables
        or a rate such as "100mbit". It sends and receives at this rate at the same time.

    Raises:
      ValueError: there are fewer than one.
    """

    num: int = 2
    link: str | Link = "1gbit"

    def __post_init__(self) -> None:
        if self.num < 1 or self.num != int(self.num):
            raise ValueError(f"Islands(num={self.num}): give a whole number, 1 or more")

    def find_link(self, machines: str | Path | Machines | None) -> Link:
        """Look the link up; `machines` as `zeroxla.plan` takes it.

        Raises:
          ValueError: there is no such link.
        """
        if isinstance(self.link, Link):
            return self.link
        machines = machines if isinstance(machines, Machines) else Machines.load(machines)
        return machines.find_link(self.link)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandsPlan(Report):
    """What islands cost besides their training steps.

    Attributes:
      outer: how the islands exchange.
      num: the number of islands.
      num_devices: the devices of an island.
      link: the link of an island to the others.
      device_bytes: for each fragment, what a device of an island sends in an exchange.
      state_bytes: the outer state of a device: outer parameters, the outer optimizer's state, and
        errors that are fed back.
      step_s: the seconds of a training step.
    """

    outer: Outer
    num: int
    num_devices: int
    link: Link
    device_bytes: tuple[int, ...]
    state_bytes: int
    step_s: float

    @staticmethod
    def of(step: Step, state: TrainState, islands: Islands, step_s: float) -> IslandsPlan | None:
        """Plan the exchanges of a step's islands; None if its config has no `outer`.

        Args:
          step: a step that has seen a batch.
          state: the shapes of its state.
          islands: their number and link.
          step_s: the seconds of a training step.

        Raises:
          ValueError: there are more fragments than elements, or the outer optimizer does not work
            element by element.
        """
        outer, num = step.config.outer, islands.num
        if outer is None:
            return None
        fragments = programs_of(step, state)
        return IslandsPlan(
            outer=fragments[0].outer,
            num=num,
            num_devices=step.mesh.size,
            link=islands.find_link(None),
            device_bytes=ExchangeBytes.of(fragments, num).device_bytes,
            state_bytes=sum(map(_state_bytes, fragments)),
            step_s=step_s,
        )

    def added_to(self, memory: MemoryPlan) -> MemoryPlan:
        """Return the memory of a device that also holds the outer state."""
        on_host = self.outer.state == "host"
        return dataclasses.replace(memory, outer_bytes=self.state_bytes, outer_on_host=on_host)

    @property
    def exchange_bytes(self) -> int:
        """The bytes that an island sends in an exchange, of the largest fragment."""
        return max(self.device_bytes) * self.num_devices

    @property
    def bytes_per_step(self) -> float:
        """The bytes that an island sends to others, averaged over steps."""
        return sum(self.device_bytes) * self.num_devices / self.outer.every

    @property
    def exchanges(self) -> ExchangeTime:
        """The exchanges in time."""
        pieces = [Piece(num_bytes=x * self.num_devices) for x in self.device_bytes]
        return ExchangeTime(
            outer=self.outer,
            fragments=tuple((piece,) for piece in pieces),
            step_s=self.step_s,
            latency_s=2 * self.link.latency_s if self.num > 1 else 0.0,  # two moves
        )

    @property
    def exchange_s(self) -> float:
        """The seconds of an exchange over the link."""
        return self.exchanges.seconds(self.link.bytes_per_s)

    @property
    def hidden_s(self) -> float:
        """The seconds of an exchange that pass while the steps of `delay` are taken."""
        return self.exchanges.hidden_s(self.link.bytes_per_s)

    @property
    def utilization(self) -> float:
        """The share of the time in which islands train; in the rest they wait for exchanges."""
        return self.exchanges.utilization(self.link.bytes_per_s)

    def needed_bytes_per_s(self, utilization: float = GOAL) -> float:
        """Return the least rate of the link with which islands train for a share of the time.

        Raises:
          ValueError: the share is not between 0 and 1.
        """
        return self.exchanges.needed_bytes_per_s(utilization)

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        name = self.link.name
        table = Table(title=f"Exchanges of {self.num} islands", title_justify="left")
        for column in ("", "of an island"):
            table.add_column(column, justify="left" if not column else "right")
        outer = self.outer
        table.add_row("exchanges", f"{len(self.device_bytes)} in {outer.every} steps")
        table.add_row("sent in an exchange", format_bytes(self.exchange_bytes))
        table.add_row("sent in a step, on average", format_bytes(self.bytes_per_step))
        table.add_row(f"an exchange takes, at {name}", f"{self.exchange_s:.4g} s")
        table.add_row(f"  hidden by a delay of {outer.delay} steps", f"{self.hidden_s:.4g} s")
        table.add_section()
        table.add_row(f"training, at {name}", f"{self.utilization:.0%} of the time")
        needed = format_rate(self.needed_bytes_per_s())
        table.add_row(f"link that {GOAL:.0%} needs", needed)
        return table

    def verdict(self) -> str:
        """Return the plan in two sentences."""
        num, sent = len(self.device_bytes), format_bytes(self.exchange_bytes)
        exchanges = "its parameters once and sends " + sent
        if num > 1:
            exchanges = f"{num} fragments and sends {sent} for each"
        return (
            f"In {self.outer.every} steps each of {self.num} islands exchanges {exchanges}; at "
            f"{self.link.name} it trains for {self.utilization:.0%} of the time. {GOAL:.0%} take a "
            f"link of {format_rate(self.needed_bytes_per_s())}."
        )

    def notes(self) -> list[str]:
        """Return the plan in two sentences."""
        return [self.verdict()]


def format_rate(bytes_per_s: float) -> str:
    """Write a rate in bits a second.

    >>> format_rate(1.25e8)
    '1 Gbit/s'
    """
    bits = 8 * bytes_per_s
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def _state_bytes(programs: OuterPrograms) -> int:
    """Return the bytes of a `FragmentState` on a device."""
    row = (1, programs.fragment.size)
    specs = programs.state_specs
    kept = [specs.copy, specs.error, specs.mean_error]
    vector = jax.ShapeDtypeStruct(row, "float32")
    opt_state = jax.eval_shape(programs.outer.optimizer.init, vector)
    num_bytes = 4 * math.prod(row) * sum(spec is not None for spec in kept)
    return num_bytes + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(opt_state))
