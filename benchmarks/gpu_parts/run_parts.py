"""Runs the parts, each in a process of its own with a time limit, and prints what they find."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from gpu_parts.child import command
from gpu_parts.findings import Finding
from gpu_parts.place import Place

POLL_S = 0.2
INTERRUPTED = "interrupted"
LOG_LINES = 12  # of a failed part that are shown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the command.

    Attributes:
      name: as `--only` takes it.
      title: its heading in the report.
      module: has the functions `measure` and `programs`.
      seconds: its share of the 10 minutes.
      arguments: of these functions, after the place.
      least_devices: the fewest devices on which it says anything.
      xla_flags: added to XLA_FLAGS while it runs on devices.
    """

    name: str
    title: str
    module: str
    seconds: float
    arguments: tuple[Any, ...] = ()
    least_devices: int = 1
    xla_flags: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of running a part.

    Attributes:
      part: the part.
      findings: its results; those from before a failure are kept.
      seconds: how long it took.
      skipped: why it did not run; "" if it did.
      error: why it did not end well; "" if it did.
    """

    part: Part
    findings: list[Finding]
    seconds: float
    skipped: str = ""
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, or need not run, and every finding passed."""
        return not self.error and all(finding.passed for finding in self.findings)

    def status(self) -> str:
        """Return its line of the overview."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        missed = sum(not finding.passed for finding in self.findings)
        if self.error:
            return f"FAILED: {self.error}"
        return f"FAILED: {missed} of {len(self.findings)} lines" if missed else "passed"


def run_all(
    parts: Sequence[Part], place: Place, *, minutes: float, console: Console
) -> list[Outcome]:
    """Run the parts one after another.

    All together take at most `minutes`: a part has its share of them, and what the parts before it
    left over. An interrupt from the keyboard ends the running part, and the parts after it are left
    out.

    Args:
      parts: the parts.
      place: where their programs go. A part without enough devices is skipped if programs run;
        otherwise it gets as many absent ones as it needs.
      minutes: the limit of all parts.
      console: where lines are printed.
    """
    begin = time.monotonic()
    whole, used = sum(part.seconds for part in parts if not reason_to_skip(part, place)), 0.0
    outcomes = []
    for part in parts:
        if reason := reason_to_skip(part, place):
            outcomes.append(Outcome(part=part, findings=[], seconds=0.0, skipped=reason))
            console.print(f"[bold]{part.name}[/]: {outcomes[-1].status()}")
            continue
        used += part.seconds
        limit_s = begin + 60 * minutes * used / whole - time.monotonic()
        outcome = run_one(part, place, max(limit_s, 0.0), console)
        colour = "green" if outcome.passed else "red"
        console.print(
            f"[bold {colour}]{part.name}[/]: {escape(outcome.status())}, {outcome.seconds:.0f} s"
        )
        outcomes.append(outcome)
        if outcome.error == INTERRUPTED:
            break
    return outcomes


def reason_to_skip(part: Part, place: Place) -> str:
    """Return why a part does not run; "" if it does."""
    if place.kind != "devices" or place.num_devices >= part.least_devices:
        return ""
    return f"needs {part.least_devices} devices, and there is {place.num_devices}"


def run_one(part: Part, place: Place, limit_s: float, console: Console) -> Outcome:
    """Run a part until it ends or its time is over; print each finding as it comes."""
    runs = place.kind == "devices"
    if not runs:
        place = dataclasses.replace(place, num_devices=max(place.num_devices, part.least_devices))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.jsonl", Path(folder) / "log.txt"
        function = "measure" if runs else "programs"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {part.xla_flags if runs else ''}".strip()
        # The processes of a part share what they compile; a folder of the user's serves all parts.
        programs = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{folder}/programs")
        cache = {"JAX_COMPILATION_CACHE_DIR": programs} if runs else {}
        with log.open("w") as to_log:
            child = subprocess.Popen(
                command(part.module, function, place, out, part.arguments),
                stdout=to_log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **cache, "XLA_FLAGS": flags},
                start_new_session=True,  # so that its own children end with it
            )
        findings: list[Finding] = []
        error = ""
        try:
            with console.status("") as status:
                while child.poll() is None and time.monotonic() - begin < limit_s:
                    seconds = time.monotonic() - begin
                    status.update(f"{part.name}: {seconds:.0f} s of at most {limit_s:.0f}")
                    findings = _show_new(out, findings, console)
                    time.sleep(POLL_S)
            if child.poll() is None:
                error = f"not done after its limit of {limit_s:.0f} s"
            elif child.returncode:
                error = _ending(child.returncode)
        except KeyboardInterrupt:  # what was found so far is worth a report
            error = INTERRUPTED
        finally:
            _end(child)
        findings = _show_new(out, findings, console)
        if error:
            lines = log.read_text(errors="replace").splitlines()
            console.print(escape("\n".join(f"    {line}" for line in lines[-LOG_LINES:])))
            if error != INTERRUPTED and child.returncode and child.returncode > 0 and lines:
                error += f": {lines[-1].strip()[:200]}"
        elif not findings:
            error = "found nothing"
    seconds = time.monotonic() - begin
    return Outcome(part=part, findings=findings, seconds=seconds, error=error)


def _show_new(out: Path, shown: list[Finding], console: Console) -> list[Finding]:
    """Print the findings in a file that are not shown yet; return all of them."""
    if not out.exists():
        return shown
    lines = out.read_text().split("\n")[:-1]  # a last line without an end is being written
    findings = [Finding(**json.loads(line)) for line in lines]
    for finding in findings[len(shown) :]:
        mark = "" if finding.passed else "[bold red]MISSED[/] "
        limit = "" if finding.limit is None else f" (at most {finding.limit:g})"
        console.print(f"  {mark}{escape(finding.name)}: {escape(finding.text)}{limit}")
    return findings


def _ending(status: int) -> str:
    """Return in words how a process ended."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end(child: subprocess.Popen[Any]) -> None:
    """End a process, and what it started, if anything is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
