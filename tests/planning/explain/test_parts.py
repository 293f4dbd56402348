"""The parts of a report, on events, findings and arrays that are made up for it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from tools.devices import made_device

from zeroxla import ZeroConfig
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.planning.explain.lines import lines_of
from zeroxla.planning.explain.link_uses import LinkUse
from zeroxla.planning.explain.make import _joined
from zeroxla.planning.explain.matching import OriginFinder
from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.explain.remedies import Case
from zeroxla.planning.explain.stalls import large, large_residuals, unfused, waiting
from zeroxla.planning.lanes import Event, TimeLine
from zeroxla.planning.target import Target
from zeroxla.program.live.residents import Resident

DEVICE = made_device(1e9, memory_bytes=1000, bytes_per_s=100)
TARGET = Target(device=DEVICE, links={}, mesh_shape={"node": 2, "device": 2})
CASE = Case(config=ZeroConfig(prefetch_bucket=0), target=TARGET)


def array(*dims):
    size = 1
    for n in dims:
        size *= n
    return SimpleNamespace(dims=dims, num_elements=size, num_bytes=4 * size)


def collective(kind="all-gather", *, results=(), operands=(), path="jit(step)/update/dot"):
    return SimpleNamespace(
        kind=kind, name="c", op_name=path, results=list(results), operands=list(operands)
    )


def traced(phase, leaf, num_elements, *, unit="1", lane="node"):
    origin = Origin(
        phase=phase,
        kind="all-gather",
        scope=leaf.rpartition("/")[0],
        leaves=(leaf,),
        unit=unit,
        num_elements=num_elements,
    )
    return Event(lane, phase, 0, 1, origin)


class TestOriginFinder:
    def test_those_that_are_alike_are_taken_in_order(self):
        one, other = (traced("forward gather", f"h_{i}/kernel", 8, unit=str(i)) for i in (1, 2))
        finder = OriginFinder([one, one, other], {})  # a loop's turns bring the same
        gather = collective(results=[array(2, 4)])
        units = [finder(gather, "forward gather", "node").unit for _ in range(3)]
        assert units == ["1", "2", "2"]
        assert finder(gather, "forward gather", "device").unit == ""
        assert finder(gather, "backward gather", "node").leaves == ()

    def test_one_collective_may_be_of_two_phases_and_bring_several_leaves(self):
        events = [traced("forward gather", "a/x", 8), traced("backward gather", "b/y", 6, unit="2")]
        finder = OriginFinder(events, {})
        gather = collective(results=[array(8), array(2, 3)])
        found = finder(gather, "forward gather+backward gather", "node")
        assert (found.leaves, found.unit, found.scope) == (("a/x", "b/y"), "1, 2", "a")
        assert (found.num_elements, found.num_bytes) == (14, 56)

    def test_what_the_compiler_adds_to_the_update_is_known_by_its_shape(self):
        finder = OriginFinder([], {"h/kernel": (4, 6), "h/bias": (6,)})
        for dims in ((4, 6), (6, 4), (1, 6, 4)):
            found = finder(collective(results=[array(*dims)]), "update", "node")
            assert found.leaves == ("h/kernel",)
        assert finder(collective(results=[array(5)]), "update", "node").leaves == ()


def test_waits_that_are_shorter_than_asked_for_are_no_stalls():
    use = LinkUse(
        **{"phase": "forward gather", "kind": "all-gather", "lane": "node", "scope": "h"},
        **{"leaves": ("h/kernel",), "unit": "1", "line": "gpt.py:1", "count": 1, "num_bytes": 8},
        **{"seconds": 3.0, "waited_s": 2.0, "hideable_s": 1.0},
    )
    (stall,) = waiting([use], CASE, 1.0)
    assert (stall.kind, stall.seconds, stall.line) == ("wait", 1.0, "gpt.py:1")
    assert stall.what == "forward gather over node: h/kernel (unit 1)"
    assert waiting([use], CASE, 1.01) == []


def attention(**changes):
    usual = {"kind": "attention", "scope": "h_0/attn", "line": "a/b/gpt.py:1", "times": 1}
    return Finding(**{**usual, "shape": "float32[8,8]", "becomes": "blocks", **changes})


def computes(seconds, *, start=0.0, **changes):
    origin = {"phase": "forward", "dims": frozenset({"8,8"}), **changes}
    return Event("compute", "forward", start, start + seconds, Origin(**origin))


class TestUnfused:
    EVENTS = (computes(2), computes(1), computes(4, dims=frozenset({"8,9"})))

    def test_takes_the_time_of_all_that_reads_or_makes_the_array(self):
        findings = [attention(), attention(scope="h_1/attn")]
        (stall,) = unfused(findings, self.EVENTS, TARGET, 3.0)
        assert (stall.kind, stall.seconds, stall.line) == ("attention", 3.0, "b/gpt.py:1")
        assert stall.what == "attention in h_0/attn and 1 more writes float32[8,8] to memory"
        assert stall.remedy.changes == {"rewrite": True}
        assert unfused(findings, self.EVENTS, TARGET, 3.1) == []

    @pytest.mark.parametrize("changes", [{"becomes": None}, {"kind": "norm"}])
    def test_is_none_where_nothing_changes_or_no_array_is_large(self, changes):
        assert unfused([attention(**changes)], self.EVENTS, TARGET, 0.0) == []

    @pytest.mark.parametrize(("dtypes", "count"), [(("float32",), 1), (("float32", "bfloat16"), 0)])
    def test_is_none_where_cudnn_has_one_kernel(self, dtypes, count):
        device = dataclasses.replace(DEVICE, flops_per_s=dict.fromkeys(dtypes, 1e9))
        target = dataclasses.replace(TARGET, device=device)
        found = unfused([attention(scope="h/cudnn_attention")], self.EVENTS, target, 0.0)
        assert len(found) == count


class TestLargeResiduals:
    ROOM = int(DEVICE.usable_bytes)

    def residual(self, share):
        num_bytes = int(share * self.ROOM)
        return Resident(kind="residuals", equation="dot", shape="f32[8]", num_bytes=num_bytes)

    def test_are_those_that_take_a_tenth_of_the_memory(self):
        small, big = self.residual(0.09), self.residual(0.11)
        assert large([small, big], TARGET) == [big]

    @pytest.mark.parametrize(
        ("total", "least", "budget"),
        [(800, 0, 600), (800, 700, 700), (800, 770, None), (8000, 0, None)],
    )
    def test_have_a_budget_that_saves_something(self, total, least, budget):
        residual = dataclasses.replace(self.residual(0.5), num_bytes=400)
        found = large_residuals([residual], total, least, TARGET)
        assert [x.remedy.changes for x in found] == ([{"memory": budget}] if budget else [])
        assert [x.seconds for x in found] == ([2 * 400 / 100] if budget else [])


def test_a_line_is_bound_by_what_takes_most_of_its_time():
    events = [
        computes(3, line="gpt.py:1", bound="compute", text="dot", scope="h"),
        computes(1, line="gpt.py:1", bound="memory", text="add"),
        computes(1, line="gpt.py:1", bound="memory", text="mul"),
        computes(2, phase="update"),
    ]
    first, second = lines_of(events, 14.0)
    assert (first.line, first.bound, first.text, first.count) == ("gpt.py:1", "compute", "dot", 3)
    assert (first.seconds, first.share) == (5, pytest.approx(5 / 14))
    assert (second.line, second.bound) == ("(update)", "memory")


def test_the_update_follows_the_gradients():
    def line(lane, seconds):
        event = Event(lane, "update", 0.0, seconds)
        return TimeLine(seconds=seconds, busy_s={lane: seconds}, memory_s=0.0, events=(event,))

    joined = _joined(line("compute", 2.0), line("node", 1.0))
    assert (joined.seconds, joined.busy_s) == (3.0, {"compute": 2.0, "node": 1.0})
    assert [(x.start_s, x.end_s) for x in joined.events] == [(0.0, 2.0), (2.0, 3.0)]
