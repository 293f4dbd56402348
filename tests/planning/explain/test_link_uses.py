"""Uses of links. Equal layers share one use, and so do the arrays that a unit sends together."""

from __future__ import annotations

import dataclasses

import pytest

from zeroxla.planning.explain.link_uses import link_uses_of
from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.explain.waits import BEGIN, MIDDLE, Wait
from zeroxla.planning.lanes import Event

KERNEL = Origin(
    phase="forward gather",
    kind="all-gather",
    scope="h_0/mlp",
    leaves=("h_0/mlp/kernel",),
    unit="1",
    num_bytes=400,
    num_elements=100,
)


def gather(start, *, layer=0, seconds=1.0, lane="node", **changes):
    """The gather of a layer's kernel."""
    origin = dataclasses.replace(
        KERNEL,
        scope=f"h_{layer}/mlp",
        leaves=(f"h_{layer}/mlp/kernel",),
        unit=str(layer + 1),
    )
    what = dataclasses.replace(origin, **changes)
    return Event(lane, what.phase, start, start + seconds, what)


def waits_for(event, seconds, place=MIDDLE):
    return Wait(start_s=event.end_s - seconds, end_s=event.end_s, event=event, place=place)


@pytest.mark.parametrize(
    ("layers", "unit"),
    [((0,), "1"), ((0, 1), "1, 2"), ((2, 0, 1), "1-3"), ((0, 1, 3), "1, 2, 4")],
)
def test_equal_layers_are_one_use(layers, unit):
    events = [gather(i, layer=layer) for i, layer in enumerate(layers)]
    (use,) = link_uses_of(events, [waits_for(x, 0.25) for x in events])
    assert (use.count, use.num_bytes, use.unit) == (len(layers), 400, unit)
    assert use.seconds == pytest.approx(len(layers))
    assert use.waited_s == use.hideable_s == pytest.approx(len(layers) / 4)
    name = "h_0/mlp" if layers == (0,) else "h_*/mlp"
    assert (use.scope, use.leaves) == (name, (f"{name}/kernel",))
    assert (use.name, use.what) == ("forward gather over node", f"{name}/kernel (unit {unit})")


def test_what_travels_with_a_unit_is_one_and_the_longest_wait_names_it():
    other = {"leaves": ("h_0/attn/kernel",), "scope": "h_0/attn", "line": "model.py:2"}
    events = [gather(0), gather(1, **other)]
    (use,) = link_uses_of(events, [waits_for(events[0], 0.25), waits_for(events[1], 0.5)])
    assert (use.count, use.num_bytes) == (2, 800)
    assert (use.seconds, use.waited_s) == (pytest.approx(2), pytest.approx(0.75))
    assert use.leaves == ("h_0/attn/kernel", "h_0/mlp/kernel")
    assert (use.scope, use.line) == ("h_0/attn", "model.py:2")
    assert use.what == "h_0/attn/kernel and 1 more (unit 1)"


def test_leaves_of_equal_size_in_one_scope_are_all_named():
    events = [gather(0), gather(1, leaves=("h_0/mlp/gate",))]
    (use,) = link_uses_of(events, [])
    assert set(use.leaves) == {"h_0/mlp/kernel", "h_0/mlp/gate"}
    assert use.num_bytes == 800


def test_those_that_are_waited_for_come_first_and_then_those_that_take_longest():
    events = [gather(0, lane="a"), gather(0, lane="b", seconds=3), gather(0, lane="c", seconds=2)]
    uses = link_uses_of(events, [waits_for(events[0], 0.5)])
    assert [use.lane for use in uses] == ["a", "b", "c"]


def test_waits_at_the_ends_of_a_step_cannot_be_hidden():
    event = gather(0)
    (use,) = link_uses_of([event], [waits_for(event, 0.5, BEGIN), waits_for(event, 0.25)])
    assert (use.waited_s, use.hideable_s) == (pytest.approx(0.75), pytest.approx(0.25))


def test_moves_of_the_host_and_persistent_leaves_have_their_own_words():
    host = Event("host update", "update", 0, 1)
    small = gather(2, unit="persistent")
    uses = {use.lane: use for use in link_uses_of([host, small], [])}
    assert uses["host update"].name == "update: host update"
    assert uses["host update"].what == "arrays of the state"
    assert uses["node"].what == "h_0/mlp/kernel (persistent)"
