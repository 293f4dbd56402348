"""Writes the tables of options in the documentation from the commands' own help texts.

    python scripts/option_tables.py          # writes them
    python scripts/option_tables.py --check  # ends with status 1 if a page is not up to date

A page names what it shows in a comment, such as `<!-- options of train: mesh pipeline -->`, and the
tables stand between it and `<!-- end of options -->`. Without names all options are shown.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from zeroxla.cli.check.options import CheckOptions
from zeroxla.cli.explain.options import ExplainOptions
from zeroxla.cli.export import ExportOptions
from zeroxla.cli.generate.options import GenerateOptions
from zeroxla.cli.option_groups import flag
from zeroxla.cli.option_help import groups_of, help_texts, paragraphs, shown
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.options import TrainOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = tuple(DOCS / name for name in ("check.md", "cli.md", "plan.md", "rlhf.md"))
COMMANDS: dict[str, type[Any]] = {
    "train": TrainOptions,
    "rlhf": RlhfOptions,
    "plan": PlanOptions,
    "check": CheckOptions,
    "export": ExportOptions,
    "generate": GenerateOptions,
    "explain": ExplainOptions,
}
PLACE = re.compile(
    r"(<!-- options of (?P<command>\w+):?(?P<groups>[\w ]*) -->\n).*?(<!-- end of options -->\n)",
    re.DOTALL,
)


def written(page: str) -> str:
    """Return a page with its tables as they should be."""

    def tables(place: re.Match[str]) -> str:
        kind = COMMANDS[place["command"]]
        groups = groups_of(kind)
        names = place["groups"].split()
        parts = [_group(groups[name]) for name in names] if names else [_table(kind)]
        return place[1] + "\n" + "\n\n".join(parts) + "\n\n" + place[4]

    return PLACE.sub(tables, page)


def _group(kind: type[Any]) -> str:
    return f"{paragraphs(kind.__doc__ or '')}\n\n{_table(kind)}"


def _table(kind: type[Any]) -> str:
    texts = help_texts(kind)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name not in texts or field.default is dataclasses.MISSING:
            continue
        default = shown(field.default)
        cells = (f"`{flag(field.name)}`", f"`{default}`" if default else "", texts[field.name])
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def main() -> int:
    """Write or check the pages; return the exit status."""
    stale = [page for page in PAGES if written(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" in sys.argv:
            print(f"{page} is not up to date; run python scripts/option_tables.py", file=sys.stderr)
        else:
            page.write_text(written(page.read_text()))
            print(f"wrote {page}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
