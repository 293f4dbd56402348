"""The tables of `gpu.py`, and its result files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from common import Check, report, table

from gpu_parts.findings import Finding
from gpu_parts.machine import Machine
from gpu_parts.run_parts import INTERRUPTED, Outcome


def overview(outcomes: Sequence[Outcome], machine: Machine) -> str:
    """Return a line for each part and a line for each finding, in markdown."""
    lines = [
        [outcome.part.name, outcome.status(), f"{outcome.seconds:.0f}"] for outcome in outcomes
    ]
    parts = [machine.note, table(["part", "outcome", "s"], lines)]
    for outcome in outcomes:
        if outcome.findings:
            parts += [f"## {outcome.part.title}", _table(outcome.findings)]
    return "\n\n".join(parts)


def _table(findings: Sequence[Finding]) -> str:
    """Return the findings; a column of bounds if there are any."""
    bounds = any(finding.limit is not None for finding in findings)
    rows = []
    for finding in findings:
        name = finding.name if finding.passed else f"**MISSED** {finding.name}"
        cells = [name, finding.text]
        if bounds:
            cells.append("" if finding.limit is None else f"{finding.limit:g}")
        rows.append([cell.replace("|", "\\|") for cell in cells])
    return table(["", "result", *["at most"] * bounds], rows)


def checks_of(outcomes: Sequence[Outcome]) -> list[Check]:
    """Return the bounds, and a check that is missed for all that failed."""
    checks = []
    for outcome in outcomes:
        part = outcome.part.name
        if outcome.error:
            checks.append(Check(name=f"{part}: {outcome.error}", value=1, limit=0))
        for finding in outcome.findings:
            name = f"{part}: {finding.name}"
            if finding.failed:
                checks.append(Check(name=f"{name}: {finding.text}", value=1, limit=0))
            elif finding.limit is not None and finding.value is not None:
                checks.append(Check(name=name, value=finding.value, limit=finding.limit))
    return checks


def write_report(
    outcomes: Sequence[Outcome], machine: Machine, *, whole: bool, folder: Path
) -> int:
    """Print the report of a GPU and write it to gpu_NAME.md and gpu_NAME.json in a folder.

    The files of a run of some parts, or of an interrupted one, have the parts' names too: they
    replace no whole report.

    Returns:
      The exit status: 0 if all parts passed, else 1.
    """
    names = [f"gpu_{machine.slug()}"]
    if not whole or any(outcome.error == INTERRUPTED for outcome in outcomes):
        names += [outcome.part.name for outcome in outcomes]
    figures = {
        "gpu": machine.kind,
        "parts": {
            outcome.part.name: {
                "status": outcome.status(),
                "seconds": outcome.seconds,
                "findings": [dataclasses.asdict(finding) for finding in outcome.findings],
            }
            for outcome in outcomes
        },
    }
    return report(
        "gpu",
        f"zeroxla on {machine.kind}",
        overview(outcomes, machine),
        figures,
        checks_of(outcomes),
        files="_".join(names),
        folder=folder,
        versions=machine.versions,
    )
