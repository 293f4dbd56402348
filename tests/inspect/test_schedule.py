"""Reports and pictures of schedules show the figures that follow from the tables."""

import itertools

import pytest
from tools.quick import thinned
from tools.schedules import BUILDERS, changed, entries

from zeroxla.inspect.schedule import schedule as report
from zeroxla.pipeline.chunked_schedules import interleaved, zb_v
from zeroxla.pipeline.make_schedule import gpipe, one_f_one_b, zero_bubble
from zeroxla.pipeline.schedule import NONE
from zeroxla.pipeline.schedule_cost import cost


def test_report_says_what_a_schedule_costs_and_holds():
    text = str(report(one_f_one_b(4, 16)))
    for words in (
        "Schedule 1f1b (stages: 4, micro-batches: 16)",
        "15.8%",
        "1.000 x (m + p - 1)(F + B)",
        "received inputs 5, gradients 1",
        "5 + 1",
    ):
        assert words in text
    found = report(zero_bubble(4, 16)).to_dict()
    assert found["in_flight"] == [4, 3, 2, 1]
    assert found["lockstep"] == found["ticks"] == 54
    assert (found["ranks"], found["chunks"], found["num_kept_slots"]) == (4, 1, 1)
    with pytest.raises(ValueError, match="cannot run"):
        report(changed(gpipe(2, 2), ("forward", 0, 0, NONE)))


def test_report_says_ranks_and_chunks():
    found = report(zb_v(4, 16))
    text = str(found)
    for words in (
        "Schedule zb-v (ranks: 4, chunks: 2, micro-batches: 16)",
        "work in all 2 chunks: forward 1, input gradient 1, weight gradient 1",
        "0.877 x (m + p - 1)(F + B)",
        "inputs of chunks held; received inputs 10, gradients 4",
        "10 + 4",
        "the most of a rank at a time",
    ):
        assert words in text
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in lines_of(text)}
    assert [rows[f"rank {r} peak stash"] for r in range(4)] == ["9", "10", "10", "9"]
    assert rows["weight gradients put off"] == "3"
    assert "put off" not in str(report(interleaved(4, 16)))
    figures = found.to_dict()
    assert (figures["stages"], figures["ranks"], figures["chunks"]) == (8, 4, 2)
    assert figures["lockstep"] == figures["ticks"] / 2 == 50


def lines_of(text):
    return [line for line in text.splitlines() if line.startswith("│")]


# Pictures of one chunk a rank, with gradients of weights apart, and of several chunks.
QUICK = ("gpipe", "zb-h1", "zb-v")
ROWS = thinned(QUICK, slow=[name for name in BUILDERS if name not in QUICK])


@pytest.mark.parametrize("name", ROWS)
def test_picture_has_a_box_for_each_entry_and_none_over_another(name, tmp_path):
    schedule = BUILDERS[name](4, 8)
    figure = report(schedule).plot(path=tmp_path / "schedule.png")
    (axes,) = figure.axes
    boxes = [p for p in axes.patches if p.get_linewidth() == 0.7]
    assert len(boxes) == len(entries(schedule)) == len(axes.texts)
    assert axes.get_xlim() == (0, pytest.approx(cost(schedule)))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"{'rank' if schedule.num_chunks > 1 else 'stage'} {row}" for row in range(4)
    ]
    assert axes.yaxis_inverted()
    for y in {box.get_y() for box in boxes}:
        row = sorted((b.get_x(), b.get_x() + b.get_width()) for b in boxes if b.get_y() == y)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(row))
    # A colour for each kind of op of each chunk, and a name in the legend.
    kinds = {
        (name, schedule.stages_of(schedule.ranks[stage]).index(stage))
        for name, _, stage, _ in entries(schedule)
    }
    assert len({box.get_facecolor() for box in boxes}) == len(kinds)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len({*names}) == len(kinds)
    assert all((", chunk " in name) == (schedule.num_chunks > 1) for name in names)
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_picture_of_many_micro_batches_leaves_out_numbers_too_small_to_read():
    figure = report(one_f_one_b(2, 600)).plot()
    assert not figure.axes[0].texts
    assert figure.get_figwidth() <= 24
