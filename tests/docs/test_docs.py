"""What the documentation says is so: its examples run, its links and option tables are right."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import models
from zeroxla.cli.export import ExportOptions
from zeroxla.cli.option_groups import flag
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.options import ALEXNET, TrainOptions
from zeroxla.config.zero_config import UNQUANTIZED

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# A block runs if the first line of its fence says so: ```python runnable
RUNNABLE = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BAR = r"\|"  # as a table's cell holds it
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_id(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


RUNNABLE_PAGES = [page for page in PAGES if RUNNABLE.search(page.read_text())]
QUICK = ("README.md", "docs/generation.md", "docs/pipeline.md", "docs/zero3.md")


def modules_with_examples() -> list[str]:
    """Names of the modules of the library and of the models whose docstrings hold examples."""
    names = []
    for package in (zeroxla, models):
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name in (package.__name__, *(module.name for module in found)):
            source = importlib.util.find_spec(name).origin
            if ">>> " in Path(source).read_text():
                names.append(name)
    return names


@pytest.fixture
def eight_devices():
    """The devices of the test session, so that `zeroxla.simulate(8)` finds what it asks for."""
    assert len(jax.devices()) == 8


@pytest.mark.smoke
@pytest.mark.usefixtures("eight_devices", "quick_compilation")
@pytest.mark.parametrize(
    "page",
    thinned(
        [page for page in RUNNABLE_PAGES if page_id(page) in QUICK],
        slow=[page for page in RUNNABLE_PAGES if page_id(page) not in QUICK],
    ),
    ids=page_id,
)
def test_examples_run(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, as one program."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": "example"}
    for block in RUNNABLE.finditer(text):
        # Blank lines before it, so that a traceback names the page's own line.
        before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * before + block[1], str(page), "exec"), namespace)


def test_the_readme_has_a_runnable_example():
    assert RUNNABLE.search((REPOSITORY / "README.md").read_text())


@pytest.mark.usefixtures("eight_devices", "quick_compilation")
@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", [p for p in PAGES if LINK.search(p.read_text())], ids=page_id)
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def options_table(*pages: str) -> dict[str, str]:
    """Return, by the name in the first cell, the second cell of every table row of the pages."""
    text = "\n".join((REPOSITORY / "docs" / page).read_text() for page in pages)
    cell = r"((?:[^|\\]|\\.)*)"
    return dict(re.findall(rf"^\| `([\w-]+)` \| {cell} \|", text, re.MULTILINE))


def test_every_option_of_the_library_is_documented_with_its_default():
    table = options_table("zero3.md", "fetch_plan.md", "zeropp.md")
    for field in dataclasses.fields(zeroxla.ZeroConfig):
        default = field.default
        shown = "none" if default in (None, ()) else default
        if field.name == "offload":
            shown = "Offload()"
        if default == UNQUANTIZED:  # a pattern with "|", which a table's cell can not hold
            shown = "UNQUANTIZED"
        if isinstance(default, int | float):
            shown = f"{default:,g}"
        assert table[field.name] == f"`{shown}`", field.name


def test_every_option_of_offload_is_documented_with_its_default():
    table = options_table("offload.md")
    for field in dataclasses.fields(zeroxla.Offload):
        shown = f"{field.default:,}" if field.name == "sub_group" else field.default
        assert table[field.name] == f"`{shown}`", field.name


def test_every_option_of_the_command_is_documented_with_its_default():
    table = options_table("cli.md")
    groups = [group.default_factory for group in dataclasses.fields(TrainOptions)]
    for field in (x for group in (*groups, ExportOptions) for x in dataclasses.fields(group)):
        if field.default is not dataclasses.MISSING:
            shown = "none" if field.default in (None, ()) else field.default
            assert table[flag(field.name)] == f"`{shown}`", flag(field.name)


def test_every_option_of_rlhf_is_documented_with_its_default():
    table = options_table("rlhf.md")
    own = [group for group in dataclasses.fields(RlhfOptions) if group.name != "mesh"]
    for field in (x for group in own for x in dataclasses.fields(group.default_factory)):
        shown = "none" if field.default in (None, ()) else str(field.default)
        # A table's cell holds no bare "|".
        assert table[flag(field.name)] == f"`{shown.replace('|', BAR)}`", flag(field.name)


def test_every_option_of_plan_is_documented_with_its_default():
    table = options_table("plan.md")
    groups = [group.default_factory for group in dataclasses.fields(PlanOptions)]
    for field in (x for group in groups for x in dataclasses.fields(group)):
        shown = "none" if field.default is None else field.default
        assert table[flag(field.name)] == f"`{shown}`", flag(field.name)


def test_every_default_of_alexnet_is_documented():
    rows = (REPOSITORY / "docs" / "cli.md").read_text().splitlines()
    usual, own = dataclasses.asdict(TrainOptions()), dataclasses.asdict(ALEXNET)
    changed = {
        name: value
        for group, values in own.items()
        for name, value in values.items()
        if value != usual[group][name] and name != "model"
    }
    assert {"batch", "steps", "learning_rate"} <= changed.keys()
    for name, value in changed.items():
        (row,) = (row for row in rows if row.startswith(f"| `{flag(name)}` |"))
        assert f"alexnet: `{value}`" in row, name
