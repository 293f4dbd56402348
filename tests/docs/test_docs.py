"""What the documentation says is so: its examples run, its links and option tables are right."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import models
from zeroxla.cli.option_groups import flag
from zeroxla.cli.option_help import groups_of, help_texts
from zeroxla.cli.train.options import ALEXNET, TrainOptions
from zeroxla.config import deepspeed
from zeroxla.config.zero_config import UNQUANTIZED
from zeroxla.models.families import FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "examples" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "docs" / "families").glob("*.md")),
]

# A block runs if the first line of its fence says so: ```python runnable
RUNNABLE = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPEC = importlib.util.spec_from_file_location(
    "option_tables", REPOSITORY / "scripts" / "option_tables.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
option_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(option_tables)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_id(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


RUNNABLE_PAGES = [page for page in PAGES if RUNNABLE.search(page.read_text())]
QUICK = ("README.md",)
SLOW = (
    *("zeroxla.rlhf.make", "zeroxla.rlhf.dpo_trainer", "zeroxla.inspect.check.check"),
    *("zeroxla.planning.explain.make", "zeroxla.checkpoint.weights.adapter_export"),
)
"""Modules whose examples take long, and do what quick tests of theirs do."""


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


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("preset", ["zeropp", "zeropp_hq", "zeropp_min"])
def test_the_advice_of_the_readme_quantizes(preset):
    """Its ten lines with `config=zeroxla.ZeroConfig.zeropp()` warn of nothing: warnings are errors
    here, and one is due where nothing is quantized."""
    found = RUNNABLE.search((REPOSITORY / "README.md").read_text())
    assert found is not None
    before, step, _ = found[1].partition("state = step.init")
    assert step
    advised = before.replace("3e-4))", f"3e-4), config=zeroxla.ZeroConfig.{preset}())")
    assert advised != before
    namespace = {}
    exec(advised, namespace)
    made, batch = namespace["step"], namespace["batch"]
    made.abstract_state(batch)
    assert any("int8" in row.wires for row in made.describe().rows)


@pytest.mark.usefixtures("eight_devices", "quick_compilation")
@pytest.mark.parametrize(
    "name",
    thinned([name for name in modules_with_examples() if name not in SLOW], slow=SLOW),
)
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
        if isinstance(default, int | float) and not isinstance(default, bool):
            shown = f"{default:,g}"
        assert table[field.name] == f"`{shown}`", field.name


def test_every_option_of_outer_is_documented_with_its_default():
    table = options_table("islands.md")
    for field in dataclasses.fields(zeroxla.Outer):
        shown = "none" if field.default is None else field.default
        assert table[field.name] == ("`sgd`" if field.name == "optimizer" else f"`{shown}`")


def test_every_option_of_offload_is_documented_with_its_default():
    table = options_table("offload.md")
    for field in dataclasses.fields(zeroxla.Offload):
        shown = f"{field.default:,}" if field.name == "sub_group" else field.default
        assert table[field.name] == f"`{shown}`", field.name


def test_tables_of_the_commands_are_what_their_help_says():
    """`python scripts/option_tables.py` writes them."""
    for page in option_tables.PAGES:
        text = page.read_text()
        assert option_tables.written(text) == text, page.name


@pytest.mark.parametrize("command", option_tables.COMMANDS)
def test_every_option_of_a_command_is_in_a_table(command):
    """On the command's own page, or among the options of several commands."""
    kind = option_tables.COMMANDS[command]
    table = options_table("cli.md", *(f"{x}.md" for x in ("plan", "rlhf", "check") if x == command))
    for group in groups_of(kind).values() or [kind]:
        names = [f.name for f in dataclasses.fields(group) if f.default is not dataclasses.MISSING]
        assert [flag(name) for name in names if flag(name) not in table] == []


def test_every_default_of_alexnet_is_in_the_help():
    usual, own = dataclasses.asdict(TrainOptions()), dataclasses.asdict(ALEXNET)
    changed = {
        (group, name): value
        for group, values in own.items()
        for name, value in values.items()
        if value != usual[group][name] and name != "model"
    }
    assert {"batch", "steps", "learning_rate"} <= {name for _, name in changed}
    groups = groups_of(TrainOptions)
    for (group, name), value in changed.items():
        assert f"alexnet: {value}" in help_texts(groups[group])[name], name


def block_of(page: str, language: str) -> str:
    """Return the first block of a page in a language."""
    text = (REPOSITORY / "docs" / page).read_text()
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_configuration_of_the_page_on_deepspeed_is_read():
    found = deepspeed.read(json.loads(block_of("from_deepspeed.md", "json")))
    assert list(found.ignored) == ["train_batch_size"]
    text = (REPOSITORY / "docs" / "from_deepspeed.md").read_text()
    assert [x for x in found.options if not re.search(rf"`{x}[`=]", text)] == []


def test_the_slurm_script_is_one(tmp_path):
    (tmp_path / "job.sh").write_text(block_of("gpus.md", "bash"))
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True)


def test_the_objects_of_kubernetes_are_yaml():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all(block_of("gpus.md", "yaml"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    number = {x["name"]: x.get("value") for x in container["env"]}["ZEROXLA_NUM_PROCESSES"]
    assert int(number) == job["spec"]["completions"] == job["spec"]["parallelism"]
    # A pod that was drained has ended with 75, is started again, and may take its time to save.
    assert service["spec"]["publishNotReadyAddresses"] is True
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert (codes, {rule["action"] for rule in rules}) == ([[75]], {"Ignore"})
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 30
    assert "--resume auto" in container["args"][0]


def test_pages_of_families_are_up_to_date():
    script = REPOSITORY / "scripts" / "family_pages.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_family_has_a_page():
    named = {file.stem for file in (REPOSITORY / "docs" / "families").glob("*.md")} - {"index"}
    assert named == {*FAMILIES, "llama", "gpt2", "bert"}
