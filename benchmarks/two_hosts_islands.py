"""Islands over slow networks: zeroxla and PyTorch, beside the rows that send in every step.

Two hosts of two devices as in two_hosts.py, with the same model. Each host is an island with a
process of JAX of its own. The coordinator is a process on the first host, so the link carries its
messages too. A turn of an island is `--every` steps. It begins when no exchange is under way and
ends when the last one is merged, so all of its exchanges are inside. Islands take turns with steps
that send nothing. After that, each row of two_hosts.py takes a step at 10 and at 1 Mbit/s, unless a
step would take more than a minute. Needs root.

    python benchmarks/two_hosts_islands.py [--rates 100mbit 10mbit 1mbit] [--rounds 2]
        [--every 100] [--peers ENVIRONMENT/bin/python] [--only-islands]

`make peers-islands` runs this with PyTorch and DeepSpeed. Writes results/two_hosts_islands.json,
.md and .png if everything was measured with the default options, and exits with 1 if a target is
missed. On 2 cores it takes 25 minutes, 40 with peers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import two_hosts
from common import report
from fleet import Steps, WorkerError, fleet
from network import Host, NetworkError
from network import two_hosts as make_hosts
from peers import task
from peers.fleets import fleets
from peers.rows import DILOCO
from peers.rows import ROWS as PEER_ROWS
from rich.console import Console
from two_hosts_islands_report import (
    Line,
    Taken,
    bits_per_second,
    body,
    draw,
    joined,
    tables,
    targets,
    too_long,
)
from two_hosts_islands_rows import ROWS
from two_hosts_report import PEERS_ALONE
from two_hosts_rows import ALONE
from two_hosts_rows import ROWS as OTHER_ROWS

WORKER = Path(__file__).with_name("two_hosts_islands_worker.py")
COORDINATOR = Path(__file__).with_name("two_hosts_islands_coordinator.py")
RATES = ("100mbit", "10mbit", "1mbit")
SLOW = 50e6
"""Bits a second below which the other rows are measured too; two_hosts.py has the faster rates."""
BURST = "32kb"
LEAST_EVERY = 20
"""With fewer steps an exchange of `streaming` is under way at any time, also between turns."""

PEERS = ("alone", "ddp", DILOCO.name)
"""What is measured of PyTorch beside islands."""

Ask = Callable[..., list[dict[str, Any]]]
"""Has a row take `steps`; returns the answers of its workers."""

_print = functools.partial(Console(stderr=True, highlight=False).print, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Islands over slow networks.")
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--every", type=int, default=task.EVERY, help="steps of a turn (H)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of a row at a rate")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with peers/requirements.txt")
    parser.add_argument("--only-islands", action="store_true", help="leave out the other rows")
    options = parser.parse_args()
    if options.every < LEAST_EVERY:
        parser.error(f"--every {options.every}: at least {LEAST_EVERY}")
    if options.peers:
        options.peers = os.path.abspath(options.peers)
    try:
        with make_hosts() as hosts:
            lines, ddp_bytes = measure_islands(hosts, options)
            if not options.only_islands:
                lines |= measure_others(hosts, options)
    except (NetworkError, WorkerError) as error:
        sys.exit(f"error: {error}")
    checks = targets(lines, every=options.every, ddp_bytes=ddp_bytes)
    is_full = set(RATES) <= set(options.rates) and options.every == task.EVERY
    if not is_full or options.only_islands:
        print(tables(lines, ddp_bytes), *checks, sep="\n")
        return 0
    draw(lines)
    figures = {"rows": {label: dataclasses.asdict(line) for label, line in lines.items()}}
    figures |= {"every": options.every, "ddp_bytes": ddp_bytes}
    text = body(lines, every=options.every, rounds=options.rounds, ddp_bytes=ddp_bytes)
    return report("two_hosts_islands", "Islands over slow networks", text, figures, checks)


def measure_islands(
    hosts: Sequence[Host], options: argparse.Namespace
) -> tuple[dict[str, Line], float | None]:
    """Have islands and steps that send nothing take turns at every rate.

    Returns:
      The rows by label, and the bytes that a host sends in a step of PyTorch DDP; None without
      peers.
    """
    ddp_bytes = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(fleet(hosts[:1], [sys.executable, str(COORDINATOR)]))
        argv = [sys.executable, str(WORKER), "--every", str(options.every)]
        ours = stack.enter_context(fleet(hosts, argv))
        lines, asks = {}, {}
        for row in ROWS.values():
            asks[row.name] = functools.partial(ours.ask, row.name, timeout=3600)
            lines[row.name] = Line(
                label=row.name,
                description=row.description,
                baseline=ALONE,
                exchanges=row.exchanges_in(options.every),
                ideal_bytes=row.ideal_bytes(options.every),
            )
        if options.peers:
            started = fleets(hosts, options.peers, PEERS, every=options.every)
            peers = stack.enter_context(started)
            set_rate(hosts, None)
            ddp_bytes = peers.take("ddp", 2).sent_bytes
            for row in (PEER_ROWS["alone"], DILOCO):
                asks[row.label] = functools.partial(peers.ask, row.name, timeout=3600)
                lines[row.label] = Line(
                    label=row.label,
                    description=row.description,
                    baseline=PEERS_ALONE,
                    exchanges=1 if row is DILOCO else 0,
                    ideal_bytes=ROWS["diloco"].ideal_bytes(options.every) if row is DILOCO else 0,
                )
        warm(hosts, lines, asks, options.every)
        for rate, rounds in ((r, 1 if _is_slowest(r) else options.rounds) for r in options.rates):
            set_rate(hosts, rate)
            turns: dict[str, list[Taken]] = {}
            for label in order_of_turns(lines, rounds):
                steps = options.every if lines[label].exchanges else max(1, options.every // 2)
                turn = take(hosts, lines[label], asks[label], steps)
                _print(f"{rate}: {label}: {turn.step_s:.3f} s a step")
                turns.setdefault(label, []).append(turn)
            for label, found in turns.items():
                lines[label].by_rate[rate] = joined(found)
    return lines, ddp_bytes


def warm(
    hosts: Sequence[Host], lines: Mapping[str, Line], asks: Mapping[str, Ask], every: int
) -> None:
    """Compile everything, exchanges too, and bring islands to a step with no exchange under way."""
    set_rate(hosts, None)
    for label, line in lines.items():
        _print(f"compiling: {label}")
        steps = ROWS[label].warm_steps(every) if label in ROWS else 2
        turn = take(hosts, dataclasses.replace(line, exchanges=None), asks[label], steps)
        line.first_loss = turn.losses[0]
        line.sent_bytes = turn.sent_bytes


def order_of_turns(lines: Mapping[str, Line], rounds: int) -> Iterator[str]:
    """Yield the rows of the turns at a rate, back and forth. Rows that wait for their exchange have
    one turn: the link says how long it takes."""
    for i in range(rounds):
        for label in reversed(lines) if i % 2 else lines:
            if i == 0 or lines[label].exchanges != 1:
                yield label


def take(hosts: Sequence[Host], line: Line, ask: Ask, steps: int) -> Taken:
    """Have a row take steps; read from the interfaces what the hosts have sent meanwhile.

    Raises:
      WorkerError: an exchange is missing, or one had only one island.
    """
    before = [host.sent_bytes() for host in hosts]
    answers = ask(steps=steps)
    sent = [host.sent_bytes() - b for host, b in zip(hosts, before, strict=True)]
    exchanges = answers[0].get("exchanges", [])
    known = line.exchanges is not None and "exchanges" in answers[0]
    if known and [x["islands"] for x in exchanges] != [task.HOSTS] * (line.exchanges or 0):
        raise WorkerError(
            f"{line.label}: {steps} steps had exchanges {exchanges}; expected {line.exchanges} of "
            f"{task.HOSTS} islands"
        )
    return Taken(
        steps=steps,
        step_s=max(sum(answer["seconds"]) for answer in answers) / steps,
        sent_bytes=sum(sent) / len(sent) / steps,
        losses=[sum(x) / len(x) for x in zip(*(a["losses"] for a in answers), strict=True)],
        exchange_s=[x["seconds"] for x in exchanges],
        num_different=int(len({answer.get("checksum") for answer in answers}) > 1),
    )


def measure_others(hosts: Sequence[Host], options: argparse.Namespace) -> dict[str, Line]:
    """Have each row of two_hosts.py take a step at each slow rate, if that is not too long."""
    rates = [rate for rate in options.rates if bits_per_second(rate) < SLOW]
    with contextlib.ExitStack() as stack:
        argv = [sys.executable, str(two_hosts.WORKER), "--port", str(two_hosts.PORT)]
        ours = stack.enter_context(fleet(hosts, argv))
        rows: dict[str, tuple[Any, Callable[[int], Steps]]] = {
            name: (row, functools.partial(ours.take, name))
            for name, row in OTHER_ROWS.items()
            if name != ALONE
        }
        if options.peers:
            peers = stack.enter_context(fleets(hosts, options.peers))
            rows |= {
                row.label: (row, functools.partial(peers.take, name))
                for name, row in PEER_ROWS.items()
                if name != "alone"
            }
        lines = {}
        set_rate(hosts, None)
        for label, (row, take_steps) in rows.items():
            _print(f"compiling: {label}")
            first = take_steps(1)
            lines[label] = line = Line(
                label=label,
                description=row.description,
                baseline=ALONE if label in OTHER_ROWS else PEERS_ALONE,
                first_loss=first.losses[0],
                sent_bytes=first.sent_bytes,
            )
            line.skipped |= {r: why for r in rates if (why := too_long(first, r))}
        for rate in rates:
            set_rate(hosts, rate)
            for label, (_, take_steps) in rows.items():
                if rate not in lines[label].skipped:
                    found = take_steps(1)
                    _print(f"{rate}: {label}: {found.seconds[0]:.2f} s a step")
                    lines[label].by_rate[rate] = Taken.of(found)
    return lines


def set_rate(hosts: Sequence[Host], rate: str | None) -> None:
    """Bound what each host sends."""
    for host in hosts:
        host.set_rate(rate, BURST)


def _is_slowest(rate: str) -> bool:
    """Return whether rounds at a rate are long and not judged."""
    return bits_per_second(rate) < 5e6


if __name__ == "__main__":
    sys.exit(main())
