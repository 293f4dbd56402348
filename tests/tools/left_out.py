"""A pytest plugin that says at the end of a run what it left out: rows of tests, by their marker.

`make test` runs neither slow, nightly nor full tests, and of many tests with parameters it runs
only some rows. With `-v` the summary names the rows of each of these tests.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

MARKERS = ("nightly", "full", "slow")  # a row with several counts for the first of them
NAMED = 6  # rows that are named for each test; the others are counted

_left_out: list[tuple[str, str]] = []  # (the test's node id, its marker)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        names = [name for name in MARKERS if item.get_closest_marker(name)]
        if names:
            _left_out.append((item.nodeid, names[0]))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist tells the first one
        session.config.workeroutput["left_out"] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {}).get("left_out", [])
    _left_out[:] = [tuple(pair) for pair in found] or _left_out  # all processes collect the same


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not _left_out:
        return
    by_marker = {name: sum(marker == name for _, marker in _left_out) for name in MARKERS[::-1]}
    counts = ", ".join(f"{count} {name}" for name, count in by_marker.items() if count)
    terminalreporter.write_line(f"left out by their markers: {counts} (-v names rows)")
    if config.option.verbose < 1:
        return
    ran = {
        report.nodeid.partition("[")[0]
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call" or getattr(report, "skipped", False)
    }
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for nodeid, marker in _left_out:
        test, _, row = nodeid.partition("[")
        if test in ran and row:
            rows[test, marker].append(row.removesuffix("]"))
    for (test, marker), names in sorted(rows.items()):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        terminalreporter.write_line(f"  {test}: {marker}: {'; '.join(names[:NAMED])}{more}")
