"""What two_hosts.py found: targets, tables and the picture."""

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
from two_hosts_rows import ALONE, PLAIN

OURS, PEER = "zeroxla", "peers"
PEERS_ALONE, FSDP2 = "PyTorch, nothing sent", "PyTorch FSDP2"
UNBOUND, SLOW, FAST = "0", "100mbit", "1gbit"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A row and what was measured of it.

    Attributes:
      label: in tables.
      description: in a line.
      side: OURS or PEER.
      sharded: no device keeps the whole state.
      ideal_bytes: a host sends in a step, if no collective moves more than it must.
      program_bytes: what the program's collectives make of it; over Gloo, for peers.
      by_rate: all steps at each rate.
    """

    label: str
    description: str
    side: str
    sharded: bool
    ideal_bytes: float
    program_bytes: float
    by_rate: Mapping[str, Steps]

    def seconds(self, rate: str) -> float:
        """Return the median step at a rate."""
        return statistics.median(self.by_rate[rate].seconds)

    def seconds_at_all_rates(self) -> float:
        """Return the median step at all rates, for a row that sends nothing."""
        return statistics.median(x for steps in self.by_rate.values() for x in steps.seconds)

    def sent_bytes(self, rate: str) -> float:
        """Return what a host sent in a step at a rate, framing included."""
        return self.by_rate[rate].sent_bytes

    def wire_seconds(self, rate: str) -> float:
        """Return how long the link is busy with a step at a bounded rate."""
        return 8 * self.sent_bytes(rate) / bits_per_second(rate)

    def bound_ratio(self, rate: str) -> float:
        """Return the step over the longer of wire time and unbounded step."""
        return self.seconds(rate) / max(self.wire_seconds(rate), self.seconds(UNBOUND))


def bits_per_second(rate: str) -> float:
    """Return what "100mbit" says."""
    number, unit = _parts(rate)
    return float(number) * UNITS[unit]


def communication_seconds(lines: Mapping[str, Line], label: str, rate: str) -> float:
    """Return how much longer a row's step takes at a rate than a step that sends nothing.

    The step that sends nothing is that of the row's own framework. The link's rate does not matter
    to it, so its steps at all rates count.
    """
    line = lines[label]
    alone = lines[ALONE if line.side == OURS else PEERS_ALONE]
    return line.seconds(rate) - alone.seconds_at_all_rates()


def targets(lines: Mapping[str, Line]) -> list[Check]:
    """Return the targets of which both sides were measured."""
    rates = next(iter(lines.values())).by_rate
    checks = []

    def check(name: str, value: float, limit: float, unit: str = "x") -> None:
        checks.append(Check(name=name, value=value, limit=limit, unit=unit))

    def have(labels: Sequence[str], *needed: str) -> bool:
        return all(x in lines for x in labels) and all(x in rates for x in needed)

    if have(["zero3"], UNBOUND):
        zero3 = lines["zero3"]
        ideal = zero3.ideal_bytes
        check("zero3: bytes over ideal, unshaped", zero3.sent_bytes(UNBOUND) / ideal, 1.03)
        shaped = [zero3.sent_bytes(rate) / ideal for rate in rates if rate != UNBOUND]
        if shaped:
            check("zero3: bytes over ideal, shaped, at worst", max(shaped), 1.08)
        for label, limit in (("zeropp", 0.27), ("zeropp_min", 0.185)):
            if label in lines:
                sent = lines[label].sent_bytes(UNBOUND) / zero3.sent_bytes(UNBOUND)
                check(f"{label}: bytes over zero3's", sent, limit)
    if have(["zero3", PLAIN], UNBOUND):
        ratio = lines["zero3"].seconds(UNBOUND) / lines[PLAIN].seconds(UNBOUND)
        check("zero3: step over plain jit FSDP's, unshaped", ratio, 1.1)
    if have([ALONE, PEERS_ALONE]):
        mine, theirs = (lines[label].seconds_at_all_rates() for label in (ALONE, PEERS_ALONE))
        check("nothing sent: step over PyTorch's", mine / theirs, 1.25)
    for label, other, limit in (
        ("zeropp", "zero3", 1 / 2.2),
        ("zeropp", FSDP2, 0.16),
        ("zeropp_min", "zeropp", 1),
    ):
        if have([label, other], SLOW):
            ratio = lines[label].seconds(SLOW) / lines[other].seconds(SLOW)
            check(f"{label}: step over {other}'s at 100 Mbit/s", ratio, limit)
    for label in ("zero3", "zeropp", "zeropp_min"):
        if have([label], SLOW, UNBOUND):
            name = f"{label}: step over the longer of wire time and unshaped step, at 100 Mbit/s"
            check(name, lines[label].bound_ratio(SLOW), 1.4)
    sharded = [x for x in lines.values() if x.side == PEER and x.sharded]
    if have([ALONE, PEERS_ALONE], FAST) and sharded:
        least = min(communication_seconds(lines, x.label, FAST) for x in sharded)
        for label in ("zero3", "zeropp", "zeropp_min"):
            if label in lines:
                ratio = communication_seconds(lines, label, FAST) / least
                name = f"{label}: communication time over the least of sharded peers', at 1 Gbit/s"
                check(name, ratio, 1)
    return checks


def tables(lines: Mapping[str, Line]) -> str:
    """Return markdown: bytes and steps of all rows, then what communication adds."""
    rates = list(next(iter(lines.values())).by_rate)
    first = rates[0]
    shaped = [rate for rate in rates if rate != UNBOUND]
    sizes = [
        [
            line.label,
            *(_megabytes(x) for x in (line.sent_bytes(first), line.program_bytes)),
            _megabytes(line.ideal_bytes),
            f"{line.sent_bytes(first) / line.ideal_bytes:.2f}x" if line.ideal_bytes else "",
            *(f"{line.seconds(rate):.2f}" for rate in rates),
        ]
        for line in lines.values()
    ]
    header = ["row", "sent, MB", "by its program, MB", "ideal, MB", "sent / ideal"]
    text = table([*header, *(f"{name(rate)}, s" for rate in rates)], sizes)
    alones = {ALONE, PEERS_ALONE}
    waits = [
        [
            line.label,
            *(
                f"{communication_seconds(lines, line.label, rate):.2f}"
                if (ALONE if line.side == OURS else PEERS_ALONE) in lines
                else ""
                for rate in rates
            ),
            *(f"{line.wire_seconds(rate):.2f}" for rate in shaped),
            *(f"{line.bound_ratio(rate):.2f}" if UNBOUND in rates else "" for rate in shaped),
        ]
        for line in lines.values()
        if line.label not in alones
    ]
    header = [
        "row",
        *(f"communication, {name(rate)}, s" for rate in rates),
        *(f"wire, {name(rate)}, s" for rate in shaped),
        *(f"step / bound, {name(rate)}" for rate in shaped),
    ]
    return f"{text}\n\n{table(header, waits)}"


def name(rate: str) -> str:
    """Return a rate in words."""
    if rate == UNBOUND:
        return "unshaped"
    number, unit = _parts(rate)
    return f"{number} {unit[0].upper() if unit[0] != 'k' else 'k'}bit/s"


def draw(lines: Mapping[str, Line], path: Path = RESULTS / "two_hosts.png") -> None:
    """Draw step time against link rate, a line for each row; unbounded at the right edge."""
    rates = sorted(
        next(iter(lines.values())).by_rate,
        key=lambda rate: float("inf") if rate == UNBOUND else bits_per_second(rate),
    )
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for line in lines.values():
        style = {"marker": "o", "linewidth": 2} if line.side == OURS else {"linestyle": "--"}
        axes.plot(range(len(rates)), [line.seconds(r) for r in rates], label=line.label, **style)
    axes.set_xticks(range(len(rates)), [name(rate) for rate in rates])
    axes.set_yscale("log")
    axes.set_ylabel("step, s")
    axes.set_xlabel("link between the hosts")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def body(lines: Mapping[str, Line], *, rounds: int, steps: int) -> str:
    """Return what was measured, and the tables, in markdown."""
    millions = task.num_parameters() / 1e6
    return (
        f"GPT of {task.LAYERS} layers of width {task.WIDTH}, {millions:.1f} million parameters, "
        f"AdamW, float32, {task.SEQUENCES} x {task.LENGTH} tokens a device; {task.HOSTS} hosts of "
        f"{task.RANKS_PER_HOST} devices: network namespaces of one machine, joined by a link of "
        "the rate above each column. zeroxla runs one process a host, PyTorch and DeepSpeed one a "
        "device, all over Gloo. Bytes are those of the interface, of one host in one step, framing "
        f"included. Rows took turns: {rounds} of {steps} steps at each rate; seconds are medians. "
        "All ranks share the machine's cores, so unshaped steps are mostly computation.\n\n"
        f"{tables(lines)}\n\n"
        "*ideal* is what a host must send if each collective moves no more than it has to; *by its "
        "program* is what the collectives that run would send: those of the compiled or lowered "
        "program for JAX; for peers the formula with Gloo's reduce-scatter, which sends what an "
        "all-reduce does. *communication* is the step less that of the row of the same framework "
        "that sends nothing; *wire* is bytes over rate; *bound* is the longer of wire and unshaped "
        "step. DeepSpeed's quantizer has no CPU version: a stand-in in PyTorch takes its place, so "
        "its bytes are DeepSpeed's and its time is not.\n\n"
        "![step time against link rate](two_hosts.png)\n\n"
        + "\n".join(f"- {line.label}: {line.description}" for line in lines.values())
    )


def _parts(rate: str) -> tuple[str, str]:
    unit = rate.lstrip("0123456789.")
    return rate.removesuffix(unit), unit


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"
