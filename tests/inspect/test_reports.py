"""Reports: as text, in a notebook, as bars."""

import re
from html import unescape

import jax
import jax.numpy as jnp
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.inspect import memory, plot_memory, schedule
from zeroxla.models import GPT
from zeroxla.planning.generation import Generating

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def plan():
    batch = {"tokens": jax.ShapeDtypeStruct((4, 17), jnp.int32)}
    asked = Generating(num_prompts=4, prompt_length=8, new_tokens=8)
    return zeroxla.plan(GPT.tiny(), {"node": 2, "device": 2}, batch, generating=asked)


def text_of(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


def test_a_notebook_shows_what_is_printed(plan):
    for report in (plan, plan.memory, schedule(zeroxla.make_schedule("1f1b", 2, 4))):
        shown = text_of(report._repr_html_())
        lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
        assert lines == [line for line in str(report).splitlines() if line.strip()]
        assert report._repr_html_().startswith("<pre")


def test_bars_of_memory_are_the_reports_parts(plan, tmp_path):
    reports = {"training": plan.memory, "generating": plan.generation}
    figure = plot_memory(reports, room=1e6, path=tmp_path / "memory.png")
    (axes,) = figure.axes
    lengths = {}
    for bar in axes.patches:
        y = round(bar.get_y() + bar.get_height() / 2)
        lengths[y] = lengths.get(y, 0) + bar.get_width()
    assert lengths == {0: plan.memory.total_bytes, 1: plan.generation.total_bytes}
    assert [label.get_text() for label in axes.get_yticklabels()] == list(reports)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_report_of_memory_can_be_drawn():
    compiled = jax.jit(lambda x: (x @ x).sum()).lower(jnp.ones((8, 8))).compile()
    report = memory(compiled)
    assert sum(report.parts().values()) == report.total_bytes
    assert plot_memory(report).axes
    step = zeroxla.make_step(GPT.tiny(), zeroxla.make_mesh(nodes=2))
    step.abstract_state({"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)})
    engine = zeroxla.HybridEngine(step)
    phases = memory(engine, phases=True, num_prompts=8, length=16)
    held = {name: sum(phase.parts().values()) for name, phase in phases.phases().items()}
    assert held == {"training": phases.training_bytes, "generating": phases.generating_bytes}
    assert plot_memory(phases.phases()).axes
    with pytest.raises(ValueError, match="no reports to draw"):
        plot_memory({})
