"""The documentation site: its reference has every public name, its pages are all in the menu."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

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


def test_link_texts_are_words():
    """A text such as `zero3.md` tells a reader of the site nothing."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    found = [
        f"{page.name}: {text}"
        for page in pages
        for text in re.findall(r"\[([^\]\n]*\.(?:md|ipynb))\]\(", page.read_text())
    ]
    assert found == []


def test_the_site_opens_with_the_opening_of_the_readme():
    pytest.importorskip("mkdocs", reason="the hook of the site needs mkdocs (make docs)")
    spec = importlib.util.spec_from_file_location(
        "docs_site", REPOSITORY / "scripts" / "docs_site.py"
    )
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    config = SimpleNamespace(docs_dir=str(REPOSITORY / "docs"))
    shown = site.on_page_markdown(
        (REPOSITORY / "docs" / "index.md").read_text(), page, config, None
    )
    readme = (REPOSITORY / "README.md").read_text()
    assert shown.splitlines()[:5] == readme.splitlines()[:5]
    for opening in ("](pictures/zero3.png)", "\n    make train ", "\n```python\nimport jax"):
        assert opening in shown
    assert "runnable" not in shown
    assert shown.count("\n# ") == 0  # the first line is the only title
