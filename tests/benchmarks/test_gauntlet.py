"""The gauntlet's own parts: six models through its checks, what counts as a refusal, the page."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import pytest
from flax import nnx

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from gauntlet_parts import (  # noqa: E402
    check_generation,
    checks,
    children,
    linen_layers,
    nnx_layers,
    own_models,
    results,
)
from gauntlet_parts.case import CHECKS as CASE_CHECKS  # noqa: E402
from gauntlet_parts.case import Case, file_of  # noqa: E402
from gauntlet_parts.model_run import Run  # noqa: E402
from gauntlet_parts.outcome import FAILED, OK, REFUSED, Wrong, outcome_of  # noqa: E402
from tools.quick import quick_compilation, thinned  # noqa: E402, F401

import zeroxla  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS: dict[str, tuple[str, ...]] = {
    "nn.Dense": ("gradients", "lora", "plan", "checkpoint"),
    "nn.BatchNorm": ("gradients", "zeropp"),
    "nnx.LinearGeneral": ("gradients", "lora"),
    "nnx.LSTMCell": ("gradients", "plan"),
    "pair of functions": ("gradients", "lora"),
    "linen LSTM": ("generation",),
}
CHECKS = {
    "gradients": checks.zero3,
    "zeropp": checks.zeropp,
    "lora": checks.lora,
    "generation": check_generation.generation,
    "plan": checks.plan,
    "checkpoint": checks.checkpoint,
}


def case_named(name: str) -> Case:
    modules = (linen_layers, nnx_layers, own_models)
    return next(case for module in modules for case in module.cases() if case.name == name)


SLOW = ("nnx.LSTMCell", "nnx.LinearGeneral", "pair of functions", "linen LSTM")


@pytest.mark.parametrize("name", thinned([name for name in MODELS if name not in SLOW], slow=SLOW))
@pytest.mark.filterwarnings("ignore")
def test_a_model_passes(name):
    run = Run(case_named(name))
    outcomes = {check: outcome_of(partial(CHECKS[check], run)) for check in MODELS[name]}
    assert {check: x for check, x in outcomes.items() if x.status != OK} == {}


def test_a_wrong_gradient_is_seen():
    expected = {"a": jax.numpy.ones(3), "b": jax.numpy.ones(2)}
    other = {**expected, "b": expected["b"] * 1.00001}
    with pytest.raises(Wrong, match="gradient of b is off by"):
        checks.same_gradients(other, expected, rounding=lambda: 1e-6)
    with pytest.raises(Wrong, match=r"change a gradient by 2\.0e-05"):
        checks.same_gradients(other, expected, rounding=lambda: 2e-5)


def test_a_refusal_is_a_sentence_of_zeroxla():
    refused = outcome_of(lambda: zeroxla.lora((min, max), targets="a", rank=0))
    assert refused.status == REFUSED
    assert "rank=0" in refused.detail


@pytest.mark.parametrize(
    "crash",
    [
        lambda: jax.numpy.ones(3) + jax.numpy.ones(4),  # a TypeError or ValueError of JAX
        lambda: zeroxla.make_step(nn.Dense, zeroxla.make_mesh(nodes=1)),  # a TypeError of ours
        lambda: [][0],
    ],
)
def test_everything_else_is_a_failure(crash):
    found = outcome_of(crash)
    assert found.status == FAILED
    assert str(REPOSITORY) not in found.where


@pytest.mark.parametrize(("library", "layers"), [(nn, linen_layers), (nnx, nnx_layers)])
def test_every_public_layer_is_a_case(library, layers):
    module = library.Module
    public = {
        name
        for name, x in vars(library).items()
        if inspect.isclass(x) and issubclass(x, module) and not name.startswith("_")
    }
    assert public == layers.LAYERS.keys() | layers.LEFT_OUT.keys()


def test_a_crash_costs_the_running_check_and_those_after_it(tmp_path):
    case = case_named("nn.Dense")
    path = file_of(tmp_path, case.name)
    passed = {"status": OK, "detail": "", "where": ""}
    known = {"name": case.name, "kind": case.kind, "package": case.package, "running": "zeropp"}
    path.write_text(json.dumps({**known, "checks": {"gradients": passed}}))
    assert children.finished(tmp_path, case.name) is None
    children._record_failure(tmp_path, case, "the process ended with code -6")
    found = children.finished(tmp_path, case.name)
    assert found is not None
    assert found["checks"]["gradients"] == passed
    assert found["checks"]["zeropp"]["detail"] == "the process ended with code -6"
    assert found["checks"]["lora"]["detail"].startswith("not run: in zeropp, the process ended")


def test_results_are_written_as_tables_with_every_reason(tmp_path, capsys):
    checks = {name: {"status": OK, "detail": "1e-7", "where": ""} for name in CASE_CHECKS}
    no_loop = {"status": REFUSED, "detail": "the model has no loop", "where": ""}
    broken = {"status": FAILED, "detail": "TypeError: x", "where": "a.py:1 f"}
    checks |= {"pipeline": no_loop, "plan": broken}
    model = {"name": "M", "kind": "encoder", "package": "flax", "checks": checks}
    code = results.write([model], 2, tmp_path, tmp_path / "page.md")
    capsys.readouterr()
    table = (tmp_path / "gauntlet.md").read_text()
    assert code == 1
    assert (
        "| M | 1e-7 | yes | yes | yes | yes | refused | 1e-7 | 1e-7 | 1e-7 | FAILED | yes |"
        in table
    )
    assert '- pipe 2: M. "the model has no loop"' in table
    assert '- plan: M. "TypeError: x" (`a.py:1 f`)' in table
    page = (tmp_path / "page.md").read_text()
    assert page == results.page_of(json.loads((tmp_path / "gauntlet.json").read_text())["models"])


def test_the_page_is_that_of_the_committed_results():
    found = json.loads((results.RESULTS / "gauntlet.json").read_text())["models"]
    assert results.PAGE.read_text() == results.page_of(found)


def test_only_the_models_need_other_packages():
    """The checks must run where nothing but zeroxla is installed."""
    others = {"transformers", "equinox", "haiku", "flaxmodels", "attnax", "tunix"}
    for path in (REPOSITORY / "benchmarks" / "gauntlet_parts").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {a.name for x in tree.body if isinstance(x, ast.Import) for a in x.names}
        names |= {x.module or "" for x in tree.body if isinstance(x, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & others, path.name
