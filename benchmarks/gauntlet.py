"""The gauntlet: Flax models of the package index, as they are, through all of zeroxla.

Every model is trained (gradients and a step against the unsharded model on one device), trained
with ZeRO++, given adapters, generated from, cut into stages, split over axes, planned, and saved
and restored.

    make gauntlet
    make gauntlet ARGS="--only GPT-2"

Results of a model are kept in runs/gauntlet/NAME.json: a run that was stopped goes on where it
was. Writes results/gauntlet.json, results/gauntlet.md and docs/models_that_work.md, and exits with
1 if a check failed. Takes an hour or two on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gauntlet_parts import children, results
from gauntlet_parts.case import Case
from gauntlet_parts.outcome import FAILED, OK, REFUSED
from gauntlet_parts.registry import all_cases

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "gauntlet"


def options(arguments: list[str]) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", help="a model's name; may be repeated")
    parser.add_argument("--kind", action="append", help="a kind of models; may be repeated")
    parser.add_argument("--again", action="store_true", help="also run what has results already")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a model")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the models' results")
    parser.add_argument("--list", action="store_true", help="print the models and end")
    parser.add_argument("--report", action="store_true", help="write the tables and run nothing")
    return parser.parse_args(arguments)


def chosen(cases: list[Case], asked: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for.

    Raises:
      SystemExit: a name or a kind is unknown.
    """
    for given, known in (
        (asked.only, {c.name for c in cases}),
        (asked.kind, {c.kind for c in cases}),
    ):
        for name in set(given or ()) - known:
            sys.exit(f"gauntlet: unknown: {name}; --list prints what there is")
    return [
        case
        for case in cases
        if (not asked.only or case.name in asked.only)
        and (not asked.kind or case.kind in asked.kind)
    ]


def line(number: int, count: int, found: dict[str, Any]) -> str:
    """Return what is printed of a model."""
    by_status = {
        status: [name for name, x in found["checks"].items() if x["status"] == status]
        for status in (OK, REFUSED, FAILED)
    }
    parts = [f"{len(by_status[OK])} passed"]
    for status in (REFUSED, FAILED):
        if by_status[status]:
            parts.append(f"{status}: {', '.join(by_status[status])}")
    return f"[{number}/{count}] {found['name']}: {'; '.join(parts)}"


def main(arguments: list[str]) -> int:
    asked = options(arguments)
    cases = all_cases()
    if asked.list:
        print("\n".join(f"{case.name} ({case.kind}, {case.package})" for case in cases))
        return 0
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    wanted = chosen(cases, asked)
    if not asked.report:
        missing = [c for c in wanted if asked.again or children.finished(folder, c.name) is None]
        print(
            f"{len(missing)} models to run, {len(wanted) - len(missing)} have results", flush=True
        )
        for i, found in enumerate(children.run(missing, folder, asked.limit), 1):
            print(line(i, len(missing), found), flush=True)
            for name, check in found["checks"].items():
                if check["status"] == FAILED:
                    print(f"    {name}: {check['detail'][:200]}", flush=True)
    found = [x for case in cases if (x := children.finished(folder, case.name)) is not None]
    if not found:
        sys.exit(f"gauntlet: no results in {folder}")
    return results.write(found, len(cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
