"""What happens to a training over two hosts when a process or the link between them fails.

`zeroxla launch --hostfile` over two hosts (network.py) runs `zeroxla train`; each fault is brought
about at a chosen moment. The launcher itself is on neither host: as over a network for management,
it still reaches both when the link between them is cut.

    python benchmarks/faults.py [--faults NAME ...]

Seconds are from the fault to the launcher's message, which it prints when every process has ended.
Each must be within the deadline that docs/hosts.md states, and after a restart every loss must be
that of a run that nothing disturbed. Writes results/faults.json and .md, exits with 1 if a target
is missed. Needs root; takes 11 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Check, report, table
from faults_run import HEARTBEAT, STEPS, Run
from network import Host, NetworkError, two_hosts
from rich.console import Console

# From a process' end, or from the launcher's noticing that one hangs, to the message.
ENDING = 10
SLOW = "4mbit"  # a step's collectives take a second


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
      name: in the table.
      cause: brings it about in a run that has begun; returns when (`time.monotonic()`) and what was
        seen of the moment.
      message: a pattern of what the launcher must say; "" where the run must go on undisturbed.
      deadline: seconds within which it must.
      mend: what a person does before the run is started again by hand; None: the launcher starts
        it again.
    """

    name: str
    cause: Callable[[Run], tuple[float, str]]
    message: str
    deadline: float
    mend: Callable[[Run], None] | None = None


def kill_in_forward(run: Run) -> tuple[float, str]:
    run.wait_until(run.has_step(12))
    return run.plant("kill"), "by itself, in a callback between two layers"


def in_loop(fault: str) -> Callable[[Run], tuple[float, str]]:
    """Return a cause: process 1 does this in its training loop."""

    def cause(run: Run) -> tuple[float, str]:
        run.wait_until(run.has_step(12))
        return run.plant(fault), "process 1, before a step"

    return cause


def kill_in_collective(run: Run) -> tuple[float, str]:
    run.wait_until(run.has_step(12))
    for host in run.hosts:
        host.set_rate(SLOW)
    run.wait_until(run.has_step(14))
    pid, before = run.pid(1), run.hosts[1].sent_bytes()
    time.sleep(0.2)
    sent = run.hosts[1].sent_bytes() - before
    os.kill(pid, signal.SIGKILL)
    for host in run.hosts:
        host.set_rate(None)
    return time.monotonic(), f"its host had sent {sent / 1e3:.0f} kB in the last 0.2 s"


def kill_while_saving(run: Run) -> tuple[float, str]:
    pid: list[int] = []

    def saving() -> bool:
        if not pid and run.has_step(12)():
            pid.append(run.pid(0))
        return bool(pid) and any((run.folder / "checkpoints").glob("*.orbax-checkpoint-tmp*/*"))

    run.wait_until(saving)
    os.kill(pid[0], signal.SIGKILL)
    when = time.monotonic()
    left = [path.name for path in (run.folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
    return when, f"process 0; left unfinished: {', '.join(left) or 'nothing'}"


def stop(run: Run) -> tuple[float, str]:
    run.wait_until(run.has_step(12))
    os.kill(run.pid(1), signal.SIGSTOP)
    return time.monotonic(), "process 1"


def cut_for_a_while(run: Run) -> tuple[float, str]:
    run.wait_until(run.has_step(12))
    when = time.monotonic()
    run.hosts[1].set_link(up=False)
    time.sleep(5)
    last = max(run.losses())
    run.hosts[1].set_link(up=True)
    again = time.monotonic()
    run.wait_until(lambda: max(run.losses()) > last)
    return when, f"the next step came {time.monotonic() - again:.1f} s after the link"


def cut_for_good(run: Run) -> tuple[float, str]:
    run.wait_until(run.has_step(12))
    run.hosts[1].set_link(up=False)
    return time.monotonic(), ""


def mend_link(run: Run) -> None:
    run.hosts[1].set_link(up=True)


FAULTS = (
    Fault(
        name="kill -9 in forward",
        cause=kill_in_forward,
        message=r"Rank 1 \(host1, \d+\) was killed by SIGKILL",
        deadline=ENDING,
    ),
    Fault(
        name="kill -9 in a collective",
        cause=kill_in_collective,
        message=r"Rank 1 \(host1, \d+\) was killed by SIGKILL",
        deadline=ENDING,
    ),
    Fault(
        name="kill -9 while a checkpoint is written",
        cause=kill_while_saving,
        message=r"Rank 0 \(host0, \d+\) was killed by SIGKILL",
        deadline=ENDING,
    ),
    Fault(
        name="an exception",
        cause=in_loop("raise"),
        message=r"Rank 1 \(host1, \d+\) ended with exit code 1",
        deadline=ENDING,
    ),
    Fault(
        name="sys.exit(0)",
        cause=in_loop("exit"),
        message=r"Rank 1 \(host1, \d+\) ended with exit code 1",
        deadline=ENDING,
    ),
    Fault(
        name="a hang in Python",
        cause=in_loop("sleep"),
        message=r"Rank 1 \(host1, \d+\) hangs: it has begun \d+ steps, and others have waited",
        deadline=HEARTBEAT + 5,
    ),
    Fault(
        name="SIGSTOP",
        cause=stop,
        message=r"Rank 1 \(host1, \d+\) has been stopped by a signal for \d+ s",
        deadline=HEARTBEAT + ENDING,
    ),
    Fault(name="link down for 5 s", cause=cut_for_a_while, message="", deadline=0),
    Fault(
        name="link down for good",
        cause=cut_for_good,
        message=r"Rank \d \(host\d, \d+\) was not heard of by the others for 10 s",
        deadline=HEARTBEAT + ENDING,
        mend=mend_link,
    ),
)


def observe(fault: Fault, hosts: Sequence[Host], folder: Path) -> dict[str, Any]:
    """Bring a fault about in a new run; return what was seen."""
    run = Run(folder, hosts, restarts=0 if fault.mend or not fault.message else 1)
    when, seen = fault.cause(run)
    status = run.wait()
    then, line = run.said_at(fault.message, when) if fault.message else (when, "")
    if fault.mend is not None:
        assert status != 0, run.output()
        fault.mend(run)
        run = Run(folder, hosts, restarts=0, more=["--resume"])
        status = run.wait()
    if status != 0:
        raise RuntimeError(f"{fault.name}: the run did not end well:\n{run.output()}")
    return {"seen": seen, "seconds": then - when, "said": line.strip(), "losses": run.losses()}


def write(results: dict[str, dict[str, Any]], undisturbed: dict[int, float]) -> int:
    """Print and write the table; return the exit code."""
    rows, checks = [], []
    for fault in FAULTS:
        if fault.name not in results:
            continue
        found = results[fault.name]
        same = found["losses"] == undisturbed
        after = "by hand" if fault.mend else "by the launcher" if fault.message else "none needed"
        seconds = f"{found['seconds']:.1f}" if fault.message else ""
        rows.append(
            [
                fault.name,
                found["seen"],
                f"`{found['said']}`" if found["said"] else "the run goes on",
                seconds,
                f"{fault.deadline}" if fault.message else "",
                after,
                "the same" if same else "OTHER",
            ]
        )
        if fault.message:
            name = f"{fault.name}: seconds to the message"
            checks.append(Check(name=name, value=found["seconds"], limit=fault.deadline, unit=" s"))
        other = sum(found["losses"].get(k) != loss for k, loss in undisturbed.items())
        name = f"{fault.name}: steps with another loss than undisturbed"
        checks.append(Check(name=name, value=other, limit=0))
    header = [
        *("fault", "its moment", "message", "seconds", "deadline"),
        *("started again", f"losses of {STEPS} steps"),
    ]
    body = (
        "`zeroxla train` over two hosts of two devices, started by `zeroxla launch --hostfile` "
        f"with `--heartbeat {HEARTBEAT}`; hosts are network namespaces of one machine. Seconds "
        "are from the fault to the message, which comes when all processes have ended. The "
        f"deadline is {ENDING} s, and the heartbeat's where a process must be missed first.\n\n"
        f"{table(header, rows)}"
    )
    title = "Faults of a training over two hosts"
    figures = {"faults": results, "undisturbed": undisturbed}
    return report("faults", title, body, figures, checks)


def main() -> int:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(description="Faults of a training over two hosts.")
    parser.add_argument("--faults", nargs="+", default=names, choices=names, metavar="NAME")
    options = parser.parse_args()
    console = Console(stderr=True)
    results: dict[str, dict[str, Any]] = {}
    try:
        with two_hosts() as hosts, tempfile.TemporaryDirectory() as work:
            run = Run(Path(work) / "undisturbed", hosts, restarts=0)
            if run.wait() != 0:
                sys.exit(f"the undisturbed run failed:\n{run.output()}")
            undisturbed = run.losses()
            console.print(f"undisturbed: {len(undisturbed)} steps")
            for number, fault in enumerate(FAULTS):
                if fault.name in options.faults:
                    results[fault.name] = observe(fault, hosts, Path(work) / f"run{number}")
                    console.print(f"{fault.name}: {results[fault.name]['seconds']:.1f} s")
    except NetworkError as error:
        sys.exit(f"error: {error}")
    return write(results, undisturbed)


if __name__ == "__main__":
    sys.exit(main())
