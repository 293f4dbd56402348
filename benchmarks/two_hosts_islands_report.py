"""What two_hosts_islands.py found: targets, tables and the picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import RESULTS, Check, table
from fleet import Steps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from peers import task
from two_hosts_islands_rows import INSIDE, ROWS
from two_hosts_report import bits_per_second as bits_per_second
from two_hosts_report import name
from two_hosts_rows import ALONE

LONGEST_S = 60.0
"""A row that sends in every step is left out where a step would take longer."""
JUDGED = ("100mbit", "10mbit")
TIME_LIMIT = 1.05
BYTES_LIMITS = {"diloco": 0.011, "streaming": 0.0016}
"""Of DDP's, with 100 steps between exchanges."""
NUM_LAST = 20
"""Steps whose losses say how far a row has come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Steps of a row at a rate.

    Attributes:
      steps: how many.
      step_s: the mean step, of the slowest host.
      sent_bytes: by one host in one step, the mean over hosts, framing included.
      losses: of each step, the mean over hosts.
      exchange_s: seconds of each exchange that was merged.
      num_different: turns after which the hosts' outer parameters were not the same bits.
    """

    steps: int
    step_s: float
    sent_bytes: float
    losses: list[float]
    exchange_s: list[float] = dataclasses.field(default_factory=list)
    num_different: int = 0

    @classmethod
    def of(cls, steps: Steps) -> Taken:
        """Return what a fleet says as one turn."""
        return cls(
            steps=len(steps.seconds),
            step_s=statistics.fmean(steps.seconds),
            sent_bytes=steps.sent_bytes,
            losses=steps.losses,
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class Line:
    """A row and what was measured of it.

    Attributes:
      label: in tables.
      description: in a line.
      baseline: the row of the same framework that sends nothing.
      exchanges: how many end in a turn; None if that is not known.
      ideal_bytes: a host sends in a step, without framing; 0 if it is not an island.
      first_loss: of its first step.
      sent_bytes: of a host in a step while the link was not shaped.
      by_rate: what was taken at each rate.
      skipped: why nothing was, by rate.
    """

    label: str
    description: str
    baseline: str
    exchanges: int | None = 0
    ideal_bytes: float = 0.0
    first_loss: float = 0.0
    sent_bytes: float = 0.0
    by_rate: dict[str, Taken] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def most_bytes(self) -> float:
        """Return what a host sent in a step, at the rate where it was the most."""
        if not self.by_rate:
            return self.sent_bytes
        return max(taken.sent_bytes for taken in self.by_rate.values())


def joined(turns: Sequence[Taken]) -> Taken:
    """Return turns of equally many steps as one."""
    return Taken(
        steps=sum(turn.steps for turn in turns),
        step_s=statistics.fmean(turn.step_s for turn in turns),
        sent_bytes=statistics.fmean(turn.sent_bytes for turn in turns),
        losses=[loss for turn in turns for loss in turn.losses],
        exchange_s=[seconds for turn in turns for seconds in turn.exchange_s],
        num_different=sum(turn.num_different for turn in turns),
    )


def too_long(step: Steps, rate: str) -> str | None:
    """Return why a row that took an unshaped step is left out at a rate; None if it is not."""
    seconds = 8 * step.sent_bytes / bits_per_second(rate) + min(step.seconds)
    return f"a step would take {seconds:.0f} s" if seconds > LONGEST_S else None


def ratio(lines: Mapping[str, Line], label: str, rate: str, over: str | None = None) -> float:
    """Return a row's mean step over the mean step of one that sends nothing, at the same rate."""
    baseline = lines[over or lines[label].baseline]
    return lines[label].by_rate[rate].step_s / baseline.by_rate[rate].step_s


def all_reduce_bytes() -> float:
    """Return what each host sends if both all-reduce float32 gradients once: the least of DDP."""
    return 2 * (1 - 1 / task.HOSTS) * 4 * task.num_parameters()


def targets(lines: Mapping[str, Line], *, every: int, ddp_bytes: float | None) -> list[Check]:
    """Return the targets of what was measured.

    Args:
      lines: by label.
      every: steps between two exchanges.
      ddp_bytes: a host sent in a step of PyTorch DDP; None if it was not measured.
    """
    checks = []

    def check(name: str, value: float, limit: float, unit: str = "x") -> None:
        checks.append(Check(name=name, value=value, limit=limit, unit=unit))

    for rate in lines["streaming"].by_rate:
        if rate in JUDGED:
            words = f"streaming: mean step over the same step that sends nothing, at {name(rate)}"
            check(words, ratio(lines, "streaming", rate, INSIDE), TIME_LIMIT)
    for label, limit in BYTES_LIMITS.items():
        line, limit = lines[label], limit * task.EVERY / every
        words = f"{label}: bytes over an all-reduce of the gradients between hosts, at worst"
        check(words, line.most_bytes / all_reduce_bytes(), limit)
        if ddp_bytes:
            words = f"{label}: bytes over PyTorch DDP's, at worst"
            check(words, line.most_bytes / ddp_bytes, limit)
    for label in BYTES_LIMITS:
        line = lines[label]
        different = sum(taken.num_different for taken in line.by_rate.values())
        check(f"{label}: turns after which the hosts' outer parameters differ", different, 0, "")
        check(
            f"{label}: loss of the last steps, divided by the loss of the first step",
            _progress(line),
            1,
        )
    return checks


def tables(lines: Mapping[str, Line], ddp_bytes: float | None) -> str:
    """Return markdown: bytes and steps of all rows, what was left out, and the exchanges."""
    rates = list(lines[ALONE].by_rate)
    reference = ddp_bytes or all_reduce_bytes()
    rows = []
    for line in lines.values():
        cells = [f"{line.most_bytes / 1e6:.3f}", f"{line.most_bytes / reference:.5f}"]
        for rate in rates:
            there = rate in line.by_rate
            cells.append(f"{line.by_rate[rate].step_s:.3f}" if there else "")
            cells.append(f"{ratio(lines, line.label, rate):.3f}" if there else "")
        rows.append([line.label, *cells])
    header = ["row", "sent, MB", "over DDP's"]
    for rate in rates:
        header += [f"{name(rate)}, s", "over nothing sent"]
    text = table(header, rows)
    left_out = [
        f"- {line.label} at {name(rate)}: {why}"
        for line in lines.values()
        for rate, why in line.skipped.items()
    ]
    if left_out:
        text += "\n\nLeft out:\n\n" + "\n".join(left_out)
    header = ["islands", "sent, MB", "without framing, MB", "sent / without"]
    for rate in rates:
        header += [f"over {INSIDE}, {name(rate)}", "exchange, s"]
    rows = []
    for line in (line for line in lines.values() if line.exchanges):
        sent, ideal = line.most_bytes, line.ideal_bytes
        cells = [f"{sent / 1e6:.4f}", f"{ideal / 1e6:.4f}", f"{sent / ideal:.3f}x"]
        for rate in rates:
            seconds = line.by_rate[rate].exchange_s
            cells.append(f"{ratio(lines, line.label, rate, INSIDE):.3f}" if seconds else "")
            cells.append(f"{statistics.fmean(seconds):.2f}" if seconds else "")
        rows.append([line.label, *cells, f"{line.first_loss:.4f}", f"{_last_loss(line):.4f}"])
    return f"{text}\n\n{table([*header, 'first loss', 'last losses'], rows)}"


def draw(lines: Mapping[str, Line], path: Path = RESULTS / "two_hosts_islands.png") -> None:
    """Draw the mean step against the link's rate, a line for each row."""
    rates = sorted(lines[ALONE].by_rate, key=bits_per_second)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for line in lines.values():
        wide = line.label in ROWS or line.exchanges
        style = {"marker": "o", "linewidth": 2} if wide else {"linestyle": "--", "marker": "."}
        points = [
            (i, line.by_rate[rate].step_s) for i, rate in enumerate(rates) if rate in line.by_rate
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=line.label, **style)
    axes.set_xticks(range(len(rates)), [name(rate) for rate in rates])
    axes.set_yscale("log")
    axes.set_ylabel("mean step, s")
    axes.set_xlabel("link between the hosts")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def body(lines: Mapping[str, Line], *, every: int, rounds: int, ddp_bytes: float | None) -> str:
    """Return what was measured, and the tables, in markdown."""
    millions = task.num_parameters() / 1e6
    return (
        f"The model, the data and the hosts of [two_hosts](two_hosts.md): a GPT of {millions:.1f} "
        f"million parameters, AdamW, float32, {task.HOSTS} hosts of {task.RANKS_PER_HOST} devices "
        "in network namespaces of one machine, whose cores all share. Here each host is an island, "
        "a process of JAX that knows nothing of the other's, and a coordinator runs on the first "
        f"one. They exchange after every {every} steps. Bytes are those of the interface, of one "
        "host in one step, framing and the coordinator's messages included, at the rate where they "
        "were the most. Seconds are means over whole turns: a turn of an island has "
        f"{every} steps and all exchanges of them, from start to merge. Turns of islands alternate "
        f"with {every // 2} steps of the rows that send nothing; {rounds} rounds at a rate, one at "
        "1 Mbit/s, and one turn for rows that wait for their exchange. The last rows send in every "
        "step: they took one step at each rate.\n\n"
        f"{tables(lines, ddp_bytes)}\n\n"
        "*over DDP's* is a row's bytes, divided by those of a step of PyTorch DDP"
        f"{', read on a link without a rate' if ddp_bytes else ', by arithmetic'}. A link with a "
        "rate has frames of 1500 bytes, whose headers and acknowledgements add 5 to 7 %; without a "
        "rate packets are larger, and they add less than 1 %. *over nothing sent* is the step over "
        f"that of the row of the same framework that sends nothing; *over {INSIDE}* is the step "
        "over the one that an island takes between exchanges. *exchange* is the mean time of an "
        "exchange, from when all islands were ready. The data are random bytes, whose loss is at "
        "least 5.545.\n\n"
        "![mean step against link rate](two_hosts_islands.png)\n\n"
        + "\n".join(f"- {line.label}: {line.description}" for line in lines.values())
    )


def _last_loss(line: Line) -> float:
    """Return the mean of the last losses of the last turn."""
    return statistics.fmean(list(line.by_rate.values())[-1].losses[-NUM_LAST:])


def _progress(line: Line) -> float:
    return _last_loss(line) / line.first_loss
