"""The documentation site: its reference has every public name, its pages are all in the menu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zeroxla
from zeroxla import data, inspect, models, quantize, rlhf
from zeroxla.config import deepspeed

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "docs" / "api"
# Packages whose `__all__` is public, and names that other pages tell users to import.
PUBLIC = (zeroxla, data, inspect, models, quantize, rlhf, deepspeed)
BESIDES = (
    "zeroxla.planning.calibrate.calibrated",
    "zeroxla.planning.calibrate.entry",
    "zeroxla.planning.exchange_time.ExchangeTime",
    "zeroxla.planning.explain.link_uses.LinkUse",
    "zeroxla.planning.explain.remedies.Remedy",
    "zeroxla.planning.explain.stalls.Stall",
    "zeroxla.planning.islands.Islands",
    "zeroxla.planning.islands.IslandsPlan",
)


def referenced() -> set[str]:
    """Return the names of the reference."""
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


@pytest.mark.smoke
def test_the_reference_has_every_public_name():
    found = referenced()
    names = {f"{package.__name__}.{name}" for package in PUBLIC for name in package.__all__}
    folders = {package.__name__ for package in PUBLIC}  # they have pages of their own
    elsewhere = {"zeroxla.quantize.WireFormat"}  # zeroxla.WireFormat
    assert names - found - folders - elsewhere == set()
    assert found - names == set(BESIDES)


def test_every_page_is_in_the_menu():
    menu = (REPOSITORY / "mkdocs.yml").read_text()
    docs = REPOSITORY / "docs"
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md")]
    pages += [f"notebooks/{page.name}" for page in (REPOSITORY / "notebooks").glob("*.ipynb")]
    assert [page for page in pages if f": {page}\n" not in menu] == []


def test_files_that_pages_name_are_there():
    """A name in backquotes that looks like a file of ours is one."""
    missing = []
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
    for page in pages:
        for name in re.findall(r"`([\w/]+/[\w]+\.(?:py|toml|md|txtpb))`", page.read_text()):
            if not any((start / name).exists() for start in (REPOSITORY, REPOSITORY / "zeroxla")):
                missing.append(f"{page.name}: {name}")
    assert not missing
