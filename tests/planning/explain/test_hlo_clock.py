"""The time line of compiled programs, on programs and machines that are made up for it."""

from __future__ import annotations

import dataclasses

import pytest
from tools.devices import made_device

from zeroxla.mesh.machines import Link
from zeroxla.planning.explain.hlo_clock import HloClock
from zeroxla.planning.explain.link_uses import link_uses_of
from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.explain.waits import waits_of
from zeroxla.planning.target import Target
from zeroxla.program import hlo

# A product of [64,64] takes 2 * 64^3 = 524,288 FLOPs: 0.524288 s. Memory takes nothing.
DEVICE = made_device(1e6)
PRODUCT_S = 2 * 64**3 / 1e6
# A gather to [64,64] over 2 devices brings 8,192 bytes: 0.8192 s over `device`.
SLOW = Link(name="slow", bytes_per_s=1e4, latency_s=0.0, of="device", source="a test")
FAST = Link(name="fast", bytes_per_s=1e5, latency_s=0.0, of="device", source="a test")
SLOW_S, FAST_S = 8192 / 1e4, 8192 / 1e5
TARGET = Target(
    device=DEVICE,
    links={"device": SLOW, "node": FAST, "host": FAST},
    mesh_shape={"node": 2, "device": 2},
)
OVER_DEVICE, OVER_NODE = "replica_groups={{0,1},{2,3}}", "replica_groups={{0,2},{1,3}}"
SCOPE = 'metadata={op_name="jit(step)/forward/gather/all_gather"}'
GATHER = f"all-gather(%shard), {OVER_DEVICE}, dimensions={{0}}, {SCOPE}"
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def named(collective, phase, lane):
    return Origin(phase=phase, kind=collective.kind, text=collective.name, scope=collective.name)


def read(text, *, scheduled=False, target=TARGET, **options):
    """Return the time line, and what travels by the name of the first instruction."""
    time = HloClock(hlo.parse(text), target, named, **options).run(scheduled=scheduled)
    uses = link_uses_of(time.events, waits_of(time.events, time.seconds))
    return time, {use.scope: use for use in uses}


def program(*lines, scheduled=False, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    kind = ", is_scheduled=true" if scheduled else ""
    return f"""HloModule step{kind}, num_partitions=4

{before}
ENTRY %main {{
  %shard = f32[32,64] parameter(0)
  %x = f32[64,64] parameter(1)
{body}
}}
"""


def test_a_gather_that_a_product_needs_is_waited_for():
    time, uses = read(
        program(
            f"%whole = f32[64,64] {GATHER}",
            "ROOT %y = f32[64,64] dot(%x, %whole), lhs_contracting_dims={1}",
        )
    )
    assert time.seconds == pytest.approx(SLOW_S + PRODUCT_S)
    (use,) = uses.values()
    assert use.waited_s == pytest.approx(SLOW_S)
    assert (use.count, use.seconds) == (1, pytest.approx(SLOW_S))
    assert use.phase == "forward gather"


def test_a_gather_beside_independent_products_is_hidden():
    time, uses = read(
        program(
            f"%whole = f32[64,64] {GATHER}",
            f"%y = f32[64,64] {DOT}",
            f"%z = f32[64,64] {DOT.replace('%x, %x', '%y, %x')}",
            "ROOT %out = (f32[64,64], f32[64,64]) tuple(%z, %whole)",
        )
    )
    assert 2 * PRODUCT_S > SLOW_S
    assert time.seconds == pytest.approx(2 * PRODUCT_S)
    assert [use.waited_s for use in uses.values()] == [0]


def test_what_a_product_does_not_cover_is_waited_for():
    time, uses = read(
        program(
            f"%whole = f32[64,64] {GATHER}",
            f"%y = f32[64,64] {DOT}",
            "ROOT %z = f32[64,64] dot(%y, %whole), lhs_contracting_dims={1}",
        )
    )
    assert time.seconds == pytest.approx(SLOW_S + PRODUCT_S)
    (use,) = uses.values()
    assert use.waited_s == pytest.approx(SLOW_S - PRODUCT_S)


def test_two_links_work_side_by_side_and_one_link_one_thing_after_another():
    gathers = [
        f"%a = f32[64,64] {GATHER}",
        f"%b = f32[64,64] {GATHER.replace(OVER_DEVICE, OVER_NODE)}",
        "ROOT %y = f32[64,64] dot(%a, %b), lhs_contracting_dims={1}",
    ]
    time, uses = read(program(*gathers))
    assert time.seconds == pytest.approx(SLOW_S + PRODUCT_S)
    assert {t.lane: t.waited_s for t in uses.values()} == {
        "device": pytest.approx(SLOW_S),
        "node": 0,
    }
    time, uses = read(program(*(line.replace(OVER_NODE, OVER_DEVICE) for line in gathers)))
    assert time.seconds == pytest.approx(2 * SLOW_S + PRODUCT_S)
    assert sum(t.waited_s for t in uses.values()) == pytest.approx(2 * SLOW_S)


def test_a_hop_behind_a_hop_shares_the_wait():
    time, uses = read(
        program(
            f"%a = f32[64,64] {GATHER.replace(OVER_DEVICE, OVER_NODE)}",
            "%part = f32[32,64] slice(%a), slice={[0:32], [0:64]}",
            f"%b = f32[64,64] {GATHER.replace('%shard', '%part')}",
            "ROOT %y = f32[64,64] dot(%x, %b), lhs_contracting_dims={1}",
        )
    )
    assert time.seconds == pytest.approx(FAST_S + SLOW_S + PRODUCT_S)
    waited = {use.lane: use.waited_s for use in uses.values()}
    assert waited == {"node": pytest.approx(FAST_S), "device": pytest.approx(SLOW_S)}


LOOP = f"""%body {{
  %state = (s32[], f32[32,64], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %mine = f32[32,64] get-tuple-element(%state), index=1
  %h = f32[64,64] get-tuple-element(%state), index=2
  %whole = f32[64,64] {GATHER.replace("%shard", "%mine")}
  %made = f32[64,64] dot(%h, %whole), lhs_contracting_dims={{1}}
  ROOT %new = (s32[], f32[32,64], f32[64,64]) tuple(%next, %mine, %made)
}}

%test {{
  %state = (s32[], f32[32,64], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(TRIPS)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
"""


@pytest.mark.parametrize("trips", [1, 2, 3, 7])
def test_the_turns_of_a_loop_multiply(trips):
    time, uses = read(
        program(
            "%zero = s32[] constant(0)",
            "%start = (s32[], f32[32,64], f32[64,64]) tuple(%zero, %shard, %x)",
            "ROOT %all = (s32[], f32[32,64], f32[64,64]) while(%start), condition=%test, "
            "body=%body",
            before=LOOP.replace("TRIPS", str(trips)),
        )
    )
    assert time.seconds == pytest.approx(trips * (SLOW_S + PRODUCT_S))
    (use,) = uses.values()
    assert use.count == trips
    assert use.seconds == pytest.approx(trips * SLOW_S)
    assert use.waited_s == pytest.approx(trips * SLOW_S)


START = (
    f"%start = (f32[32,64], f32[64,64]) all-gather-start(%shard), {OVER_DEVICE}, "
    f"dimensions={{0}}, {SCOPE}"
)
DONE = "%whole = f32[64,64] all-gather-done(%start)"


@pytest.mark.parametrize("between", [0, 1, 2])
def test_of_a_schedule_what_stands_between_start_and_done_hides(between):
    products = [f"%y{i} = f32[64,64] {DOT}" for i in range(2)]
    time, uses = read(
        program(
            START,
            *products[:between],
            DONE,
            *products[between:],
            "ROOT %z = f32[64,64] dot(%x, %whole), lhs_contracting_dims={1}",
            scheduled=True,
        ),
        scheduled=True,
    )
    waited = max(0.0, SLOW_S - between * PRODUCT_S)
    assert time.seconds == pytest.approx(waited + 3 * PRODUCT_S)
    (use,) = uses.values()
    assert use.waited_s == pytest.approx(waited)


def test_a_collective_of_a_schedule_without_a_start_hides_behind_nothing():
    time, uses = read(
        program(
            f"%whole = f32[64,64] {GATHER}",
            f"%y = f32[64,64] {DOT}",
            "ROOT %out = (f32[64,64], f32[64,64]) tuple(%y, %whole)",
            scheduled=True,
        ),
        scheduled=True,
    )
    assert time.seconds == pytest.approx(SLOW_S + PRODUCT_S)
    assert [use.waited_s for use in uses.values()] == [pytest.approx(SLOW_S)]


def test_a_copy_with_a_start_runs_beside_the_computation():
    """Of a GPU's schedule; on this machine memory takes nothing, so it is given a product."""
    body = f"""%copied {{
  %x = f32[64,64] parameter(0)
  ROOT %made = f32[64,64] {DOT}
}}
"""
    start = "%start = ((f32[64,64]), f32[64,64]) fusion-start(%x), kind=kLoop, calls=%copied"
    done = "%copy = f32[64,64] fusion-done(%start)"
    product = f"%y = f32[64,64] {DOT}"
    end = "ROOT %out = (f32[64,64], f32[64,64]) tuple(%y, %copy)"
    beside, _ = read(
        program(start, product, done, end, before=body, scheduled=True), scheduled=True
    )
    assert beside.seconds == pytest.approx(PRODUCT_S)
    after, _ = read(program(start, done, product, end, before=body, scheduled=True), scheduled=True)
    assert after.seconds == pytest.approx(2 * PRODUCT_S)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_copy_to_the_host_takes_the_hosts_link(scheduled):
    time, uses = read(
        program(
            "%start = (f32[32,64]{1,0:S(5)}, f32[32,64]{1,0}, u32[]) copy-start(%shard)",
            f"%y = f32[64,64] {DOT}",
            "%there = f32[32,64]{1,0:S(5)} copy-done(%start)",
            "ROOT %out = (f32[64,64], f32[32,64]) tuple(%y, %there)",
            scheduled=scheduled,
        ),
        scheduled=scheduled,
    )
    (use,) = uses.values()
    assert (use.lane, use.seconds) == ("host", pytest.approx(FAST_S))
    assert time.seconds == pytest.approx(PRODUCT_S)  # it runs beside the product


def test_a_collective_over_all_devices_takes_the_slowest_link():
    flat = GATHER.replace(OVER_DEVICE, "replica_groups={{0,1,2,3}}")
    time, uses = read(program(f"ROOT %whole = f32[128,64] {flat}"))
    (use,) = uses.values()
    assert use.lane == "device"
    assert (
        time.seconds == use.seconds == pytest.approx(TARGET.seconds("device", "all-gather", 2**15))
    )


def test_a_reduce_counts_the_bytes_that_it_is_given():
    name = SCOPE.replace("forward/gather/all_gather", "transpose(forward)/reduce/psum_scatter")
    scatter = f"reduce-scatter(%x), {OVER_DEVICE}, dimensions={{0}}, to_apply=%add, {name}"
    add = """%add {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
    _, uses = read(program(f"ROOT %part = f32[32,64] {scatter}", before=add))
    (use,) = uses.values()
    assert use.seconds == pytest.approx(TARGET.seconds("device", "reduce-scatter", 4 * 64 * 64))
    assert use.phase == "reduce"


def test_products_take_the_time_of_their_dtype():
    both = {"float32": 1e6, "bfloat16": 4e6}
    target = dataclasses.replace(TARGET, device=dataclasses.replace(DEVICE, flops_per_s=both))
    for dtype, seconds in (("f32", PRODUCT_S), ("bf16", PRODUCT_S / 4)):
        text = program(f"ROOT %y = f32[64,64] {DOT}").replace("f32[64,64]", f"{dtype}[64,64]")
        assert read(text, target=target)[0].seconds == pytest.approx(seconds)


def test_what_is_not_asked_for_takes_no_time():
    time, uses = read(
        program(
            f"%whole = f32[64,64] {GATHER}",
            f"ROOT %y = f32[64,64] {DOT.replace('%x, %x', '%x, %whole')}, "
            'metadata={op_name="jit(step)/update/dot"}',
        ),
        wanted=lambda path: "update" in path,
    )
    assert not uses
    assert time.seconds == pytest.approx(PRODUCT_S)


def test_a_loop_whose_turns_depend_on_data_takes_the_turns_that_are_assumed():
    text = program(
        "%which = s32[] parameter(2)",
        "%start = (s32[], f32[32,64], f32[64,64]) tuple(%which, %shard, %x)",
        "ROOT %all = (s32[], f32[32,64], f32[64,64]) while(%start), condition=%test, body=%body",
        before=LOOP.replace("TRIPS", "7"),
    )
    time, _ = read(text, while_trips=5)
    assert time.seconds == pytest.approx(5 * (SLOW_S + PRODUCT_S))


@pytest.mark.parametrize(
    "call",
    [
        "ROOT %y = f32[64,64] call(%x), to_apply=%inside",
        "%start = ((f32[64,64]), f32[64,64]) async-start(%x), calls=%inside\n"
        "  ROOT %y = f32[64,64] async-done(%start)",
    ],
)
def test_what_is_called_is_run(call):
    inside = f"""%inside {{
  %x = f32[64,64] parameter(0)
  ROOT %made = f32[64,64] {DOT}
}}
"""
    for scheduled in (False, True):
        time, _ = read(program(call, before=inside, scheduled=scheduled), scheduled=scheduled)
        assert time.seconds == pytest.approx(PRODUCT_S)


def test_the_longest_branch_counts():
    branches = f"""%short {{
  ROOT %same = f32[64,64] parameter(0)
}}

%long {{
  %x = f32[64,64] parameter(0)
  ROOT %made = f32[64,64] {DOT}
}}
"""
    time, _ = read(
        program(
            "%which = pred[] constant(true)",
            "ROOT %y = f32[64,64] conditional(%which, %x, %x), true_computation=%long, "
            "false_computation=%short",
            before=branches,
        )
    )
    assert time.seconds == pytest.approx(PRODUCT_S)


def test_a_collective_of_one_device_takes_nothing():
    alone = GATHER.replace(OVER_DEVICE, "replica_groups={{0},{1},{2},{3}}")
    time, uses = read(program(f"ROOT %whole = f32[32,64] {alone}"))
    assert time.seconds == 0
    assert not uses
