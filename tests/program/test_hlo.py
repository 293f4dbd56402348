"""HLO text: trip counts, replica groups, and what XLA prints for GPUs."""

from __future__ import annotations

import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tools.inspect import (
    DATA,
    GPU_PROGRAM,
    LEAF,
    gather_hops,
    in_both_forms,
    lower,
    make_mesh,
    summary,
)

from zeroxla.inspect import comms
from zeroxla.program import hlo


@pytest.mark.parametrize(
    ("start", "keep_going", "change", "trips"),
    [
        (0, lambda i: i < 7, 1, 7),
        (3, lambda i: i < 9, 2, 3),
        (3, lambda i: i <= 9, 2, 4),
        (10, lambda i: i > 0, -3, 4),
        (10, lambda i: i >= 1, -3, 4),
        (5, lambda i: i < 5, 1, 0),
    ],
)
def test_trip_count_follows_from_the_counter_of_a_lowered_loop(start, keep_going, change, trips):
    mesh = make_mesh(2, 4)

    def step(x):
        def body(carry):
            return carry[0] + change, lax.psum(carry[1], "device")

        return lax.while_loop(lambda carry: keep_going(carry[0]), body, (start, x))[1]

    assert comms(lower(step, mesh, DATA, DATA, (8, 4)), mesh).count() == trips


def test_loop_that_depends_on_data_asks_for_its_trips():
    mesh = make_mesh(2, 4)

    def step(x):
        def body(x):
            return x + lax.psum(x, "device")

        return lax.while_loop(lambda x: lax.psum(x.sum(), "node") < 9, body, x)

    lowered = lower(step, mesh, DATA, DATA, (8, 4))
    for program in (lowered, lowered.compile()):
        with pytest.raises(ValueError, match=r"trip count depends on data; pass while_trips=N"):
            comms(program, mesh)
        report = comms(program, mesh, while_trips=10)
        assert report.count(axis="device") == 10
        assert report.count(axis="node") == 11  # the condition is checked once more


def test_loop_that_depends_on_data_is_of_no_interest_without_collectives():
    mesh = make_mesh(2, 4)

    def step(x):
        x = lax.psum(x, "device")
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    for report in in_both_forms(lower(step, mesh, DATA, DATA, (8, 4)), mesh):
        assert report.count() == 1


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['node'=2,'device'=4] {'device'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['node'=2,'device'=4] {'node'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['node'=2,'device'=4] {'node','device'}", (tuple(range(8)),)),
        ("mesh['node'=2,'device'=4] {'device','node'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=2,'b'=4,'c'=1] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        (
            "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        (
            "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
    ],
)
def test_replica_groups_in_every_printed_form(text, groups):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}"
    assert hlo.replica_groups(attributes) == groups


def test_replica_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="a form this reader does not know"):
        hlo.replica_groups(", replica_groups=@mesh<a=8> {a}, dimensions={0}")


def test_asynchronous_gpu_collectives_count_once():
    report = comms(GPU_PROGRAM, make_mesh(2, 4))
    assert summary(report) == {
        # Two operands of 8 x 4 merged into one collective: 512 bytes gathered, half received.
        ("node", "all-gather", "forward gather+backward gather", "f32", 1, 256, 1024),
        # 256 packed int4 = 128 bytes gathered.
        ("node", "all-gather", "other", "s4", 1, 64, 256),
        ("node", "collective-permute", "other", "f32", 6, 6 * 256, 6 * 4 * 256),
        ("device", "all-reduce", "other", "f32", 6, 6 * 2 * 256 * 3 / 4, 0),
        ("node", "all-reduce", "other", "f32", 6, 6 * 2 * 256 / 2, 6 * 4 * 256),
        ("device", "reduce-scatter", "reduce", "f32", 1, 1024 * 3 / 4, 0),
        # Empty replica_groups: all devices.
        ("node+device", "reduce-scatter", "reduce", "f32", 1, 1024 * 7 / 8, 1024 * 7 / 8),
    }
    assert report.count(phase="forward gather") == report.count(phase="backward gather") == 1
    shapes = {c.name: [s.dims for s in c.results] for c in hlo.collectives(hlo.parse(GPU_PROGRAM))}
    assert shapes == {
        "ag": [(16, 4), (16, 4)],
        "packed": [(256,)],
        "cp": [(16, 4)],
        "old": [(16, 4)],
        "new": [(16, 4)],
        "sugar": [(16, 4)],
        "rs": [(8, 4)],
    }


def test_int4_without_a_packed_layout_takes_a_byte_each():
    report = comms(GPU_PROGRAM.replace("{0:E(4)}", "{0}"), make_mesh(2, 4))
    assert report.total_bytes(dtype="s4") == 128


def test_part_of_an_axis_is_that_axis_with_a_smaller_group():
    text = GPU_PROGRAM.replace("[2,4]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}")
    (row,) = comms(text, make_mesh(2, 4)).select(axis="device", kind="all-reduce")
    assert (row.group_size, row.received_bytes) == (2, 6 * 2 * 256 / 2)


def test_one_branch_of_a_gpu_conditional_counts_and_is_an_upper_bound():
    text = GPU_PROGRAM.replace(
        "while(%start), condition=%condition, body=%body",
        "conditional(%zero, %start, %start), true_computation=%body, false_computation=%body",
    )
    report = comms(text, make_mesh(2, 4))
    assert len(report.select(kind="collective-permute")) == 2
    assert report.count(kind="collective-permute") == 1
    assert all(row.conditional for row in report.select(kind="collective-permute"))


@pytest.mark.parametrize("kind", ["ragged-all-to-all", "collective-broadcast"])
def test_collective_without_a_byte_rule_is_refused(kind):
    text = GPU_PROGRAM.replace("s4[256]{0:E(4)} all-gather(", f"s4[256]{{0:E(4)}} {kind}(")
    with pytest.raises(NotImplementedError, match=f"'packed' is a '{kind}'"):
        comms(text, make_mesh(2, 4))


def test_text_that_is_no_hlo_is_refused():
    mesh = make_mesh(2, 4)
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8))
    with pytest.raises(ValueError, match="not HLO text"):
        comms(lowered.as_text(), mesh)
    with pytest.raises(ValueError, match="not function"):
        comms(gather_hops, mesh)
