"""The rules of advice: each speaks where its setting is missing, and only there."""

from __future__ import annotations

import dataclasses

import pytest

from zeroxla import WireFormat, ZeroConfig
from zeroxla.mesh.machines import Link, Machines
from zeroxla.planning.bottleneck import REMEDIES
from zeroxla.planning.explain.link_uses import LinkUse
from zeroxla.planning.explain.remedies import Case, remedy_for
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE, Target

LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6, of="device", source="a test")
TARGET = Target.find({"node": 2, "device": 4}, device="h200", link=LINK, machines=None)
GATHER = LinkUse(
    phase="forward gather",
    kind="all-gather",
    lane="node",
    leaves=("h/kernel",),
    unit="1",
    scope="h",
    line="models/gpt.py:1",
    count=1,
    num_bytes=10**7,
    seconds=0.01,
    waited_s=0.01,
    hideable_s=0.01,
)
AGAIN = dataclasses.replace(GATHER, phase="backward gather")
REDUCE = dataclasses.replace(GATHER, phase="reduce", kind="reduce-scatter")
SMALL = dataclasses.replace(GATHER, unit="persistent")
UPDATE = dataclasses.replace(GATHER, phase="update")


def inside(use):
    return dataclasses.replace(use, lane="device")


def advice(use, *, target=TARGET, weights="", unit_elements=0, **options):
    """Return the fields that the advice changes."""
    config = ZeroConfig(**options)
    case = Case(config=config, target=target, weights=weights, unit_elements=unit_elements)
    remedy = remedy_for(use, case)
    return None if remedy is None else dict(remedy.changes)


QUARTER = WireFormat(bits=8)
ONCE = {"inter_node_gather": "step", "hpz_size": "node"}


@pytest.mark.parametrize(
    ("use", "options", "changes"),
    [
        (GATHER, {"prefetch_bucket": 0}, {"prefetch_bucket": None}),
        (AGAIN, {"prefetch_bucket": 0}, {"prefetch_bucket": None}),
        (REDUCE, {"prefetch_bucket": 0}, {"prefetch_bucket": None}),
        (SMALL, {}, {"persistence_threshold": 0}),
        (SMALL, {"persistence_threshold": 0}, None),
        (SMALL, {"prefetch_bucket": 0}, {"persistence_threshold": 0}),
        (GATHER, {"accumulate": 2}, ONCE),
        (GATHER, {"accumulate": 2, **ONCE}, {"weight_wire": QUARTER}),
        (AGAIN, {"accumulate": 2}, ONCE),
        (AGAIN, {}, {"hpz_size": "node"}),
        (AGAIN, {"hpz_size": "node"}, {"weight_wire": QUARTER}),
        (inside(AGAIN), {}, {"weight_wire": QUARTER}),
        (GATHER, {"weight_wire": QUARTER}, None),
        (REDUCE, {"accumulate": 2}, {"inter_node_reduce": "step"}),
        (
            REDUCE,
            {"accumulate": 2, "inter_node_reduce": "step"},
            {"inter_node_gradient_wire": QUARTER},
        ),
        (REDUCE, {}, {"inter_node_gradient_wire": QUARTER}),
        (REDUCE, {"inter_node_gradient_wire": QUARTER}, None),
        (inside(REDUCE), {"inter_node_gradient_wire": QUARTER}, {"gradient_wire": QUARTER}),
        (inside(REDUCE), {}, {"gradient_wire": QUARTER}),
        (REDUCE, {"gradient_wire": QUARTER}, None),
        (UPDATE, {"owners": False}, {"owners": True}),
        (UPDATE, {}, None),
        (dataclasses.replace(GATHER, phase="forward", kind="all-reduce"), {}, None),
        (dataclasses.replace(GATHER, phase="other", kind="all-reduce"), {}, None),
    ],
)
def test_the_setting_that_is_missing(use, options, changes):
    assert advice(use, **options) == changes


def test_a_bucket_smaller_than_a_unit_is_made_as_large():
    options = {"prefetch_bucket": 10, "unit_elements": None}
    case = Case(config=ZeroConfig(**options), target=TARGET, unit_elements=1000)
    assert remedy_for(GATHER, case).changes == {"prefetch_bucket": 1000}


def test_nothing_is_gathered_ahead_on_a_device_that_does_one_thing_at_a_time():
    cpu = Target.find({"node": 2, "device": 4}, device="cpu", link=LINK, machines=None)
    assert advice(GATHER, target=cpu, prefetch_bucket=0) == {"weight_wire": QUARTER}


def test_the_stages_of_a_pipeline_keep_their_leaves():
    assert advice(GATHER, weights="tick") == {}
    send = dataclasses.replace(GATHER, phase="send", kind="collective-permute", lane="pipe")
    assert advice(send, weights="tick") is None
    assert advice(GATHER, weights="step") == {"weight_wire": QUARTER}


def test_without_devices_in_a_node_there_are_no_secondary_shards():
    alone = Target.find({"node": 8, "device": 1}, device="h200", link=LINK, machines=None)
    assert advice(AGAIN, target=alone) == {"weight_wire": QUARTER}
    assert advice(GATHER, target=alone, accumulate=2) == {"weight_wire": QUARTER}


@pytest.mark.parametrize("count", [1, 4])
def test_fewer_bytes_do_not_help_against_latency(count):
    late = dataclasses.replace(LINK, latency_s=0.006 / count)
    target = Target.find({"node": 2, "device": 4}, device="h200", link=late, machines=None)
    assert advice(dataclasses.replace(GATHER, count=count), target=target) is None
    assert advice(dataclasses.replace(REDUCE, count=count), target=target) is None


@pytest.mark.parametrize("owners", [True, False])
@pytest.mark.parametrize(
    ("lane", "words"),
    [
        (HOST, "Offload.ratio"),
        (HOST_UPDATE, 'Offload(update="device")'),
        (DISK, REMEDIES[DISK]),
    ],
)
def test_the_host_is_given_less_to_do(lane, words, owners):
    use = dataclasses.replace(GATHER, lane=lane, phase="update", kind="")
    remedy = remedy_for(use, Case(config=ZeroConfig(owners=owners), target=TARGET))
    assert words in remedy.text


def test_every_device_of_the_tables_can_be_advised():
    for name in Machines.load().devices:
        target = Target.find({"node": 2, "device": 4}, device=name, link=LINK, machines=None)
        assert advice(AGAIN, target=target) == {"hpz_size": "node"}
