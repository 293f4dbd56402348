"""Runs cases in child processes: each case has a time limit, and a crash loses one check."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gauntlet_parts.case import CHECKS, Case, file_of
from gauntlet_parts.outcome import FAILED

BENCHMARKS = Path(__file__).resolve().parent.parent
GROUP = 12
"""Cases that one child runs after another: importing JAX takes as long as a small case."""


def finished(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a case's results if all of its checks have one."""
    path = file_of(folder, name)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return None if "running" in found or found["checks"].keys() != set(CHECKS) else found


def run(cases: Sequence[Case], folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run cases and yield the results of each.

    Args:
      cases: to be run, in this order.
      folder: of the result files.
      limit_s: seconds for a case; after them it has failed.
    """
    left = list(cases)
    while left:
        group = [case for case in left if case.package == left[0].package][:GROUP]
        done = 0
        for found in _run_group(group, folder, limit_s):
            done += 1
            yield found
        left = [case for case in left if case not in group[:done]]


def _run_group(group: Sequence[Case], folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run cases in one child; end after the first that crashes or takes too long."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(BENCHMARKS.parent), str(BENCHMARKS))),
        # The checks ask what is computed, not how fast.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "USE_TORCH": "0",
        "USE_TF": "0",
    }
    for case in group:
        file_of(folder, case.name).unlink(missing_ok=True)
    names = [case.name for case in group]
    log = (folder / "log.txt").open("a")
    child = subprocess.Popen(
        [sys.executable, "-m", "gauntlet_parts.run_cases", str(folder), *names],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        cwd=BENCHMARKS.parent,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    try:
        for case in group:
            why = _wait(child, lines, case.name, limit_s)
            if why is not None:
                _record_failure(folder, case, why)
            yield json.loads(file_of(folder, case.name).read_text())
            if why is not None:
                return
    finally:
        child.kill()
        child.wait()
        log.close()


def _read(child: subprocess.Popen, lines: queue.Queue) -> None:
    for line in child.stdout or ():
        lines.put(line.strip())
    lines.put(None)


def _wait(child: subprocess.Popen, lines: queue.Queue, name: str, limit_s: float) -> str | None:
    """Wait until the child says that a case is done; return what went wrong, or None."""
    try:
        while (line := lines.get(timeout=limit_s)) != name:
            if line is None:
                return f"the process ended with code {child.wait()}"
    except queue.Empty:
        return f"it took longer than {limit_s:.0f} s"
    return None


def _record_failure(folder: Path, case: Case, why: str) -> None:
    """Write that the running check failed, and that those after it did not run."""
    path = file_of(folder, case.name)
    found: dict[str, Any] = {"name": case.name, "kind": case.kind, "package": case.package}
    found["checks"] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    running = found.pop("running", None)
    for name in CHECKS:
        text = why if name in (running, None) else f"not run: in {running or 'the import'}, {why}"
        found["checks"].setdefault(name, {"status": FAILED, "detail": text, "where": ""})
    path.write_text(json.dumps(found, indent=1) + "\n")
