"""The report on a step: as text at several widths, as a picture, as JSON; and what is refused."""

from __future__ import annotations

import io
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console
from tools.perceptrons import Perceptrons

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.inspect import plot_explanation
from zeroxla.inspect.pictures.explained import WAITS

BATCH = {"tokens": jax.ShapeDtypeStruct((16, 33), jnp.int32)}


@pytest.fixture(scope="module")
def step():
    config = ZeroConfig(persistence_threshold=0, prefetch_bucket=0)
    return zeroxla.make_step(
        Perceptrons(), zeroxla.make_mesh(nodes=2), optax.sgd(0.1), config=config
    )


@pytest.fixture(scope="module")
def report(step):
    return zeroxla.explain(step, BATCH, compiled=False)


def test_it_adds_up(report):
    computed = sum(e.end_s - e.start_s for e in report.time.events if e.lane == "compute")
    assert report.waited_s + computed == pytest.approx(report.time.seconds, rel=0.02)
    assert sum(use.waited_s for use in report.uses) == pytest.approx(report.waited_s, rel=0.02)
    assert sum(line.seconds for line in report.lines) == pytest.approx(computed)
    shares = sum(line.share for line in report.lines)
    assert shares == pytest.approx(computed / report.time.seconds)
    assert all(use.hideable_s <= use.waited_s <= use.seconds * 1.0001 for use in report.uses)


def test_lines_are_those_of_the_model_and_both_directions_are_one(report):
    named = [x for x in report.lines if x.line.startswith("tools/perceptrons.py:")]
    assert named
    assert len({x.line for x in report.lines}) == len(report.lines)
    # Two products, each with two of backward, in each of 4 turns; and what else the line makes.
    assert named[0].count >= 2 * 3 * 4
    assert named[0].bound == "memory"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_it_fits_a_width(report, width):
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None)
    for table in report.tables():
        console.print(table)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = "".join(lines)
    assert "…" not in words
    for name in ("prefetch_bucket", "waits, ms", "bound by"):
        assert name in " ".join(" ".join(lines).split()), name


def test_it_prints_its_source_and_its_first_line(report):
    text = str(report)
    assert text.startswith("A step on node=2 x device=4 of NVIDIA H200 SXM, by its trace: ")
    assert "Collectives that the compiler adds to the update are not known" in text


def test_it_is_plain_for_json(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["device"] == "h200"
    assert found["stalls"][0]["remedy"]
    assert len(found["lines"]) <= 10


def test_the_picture_has_a_row_for_each_lane_and_waits_in_red(report, tmp_path):
    figure = plot_explanation(report, path=tmp_path / "step.png")
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "compute"
    assert {label.split("\n")[0] for label in labels} == {"compute", "node", "device"}
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-1] == "waits"
    assert len(set(legend)) == len(legend)
    colors = [collection.get_facecolor()[0] for collection in axes.collections]
    red = tuple(int(WAITS[i : i + 2], 16) / 255 for i in (1, 3, 5))
    assert any(tuple(color[:3]) == pytest.approx(red) for color in colors)
    assert (tmp_path / "step.png").stat().st_size > 0


def test_the_batch_that_was_seen_last_is_taken(step, report):
    step.abstract_state(BATCH)
    assert zeroxla.explain(step, compiled=False).time.seconds == report.time.seconds


def test_bad_input_is_refused(step):
    with pytest.raises(ValueError, match=r"explains a zeroxla.Step, not int"):
        zeroxla.explain(3)
    with pytest.raises(ValueError, match=r"least_share=1: give a share"):
        zeroxla.explain(step, BATCH, least_share=1)
    with pytest.raises(ValueError, match=r"there is no device 'h2000'"):
        zeroxla.explain(step, BATCH, device="h2000")
    fresh = zeroxla.make_step(Perceptrons(), step.mesh, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"the step has seen no batch"):
        zeroxla.explain(fresh)
