"""The planned time of a pipeline, schedule by schedule, where computation is all that counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from tools.devices import made_device
from tools.perceptrons import Perceptrons
from tools.quick import thinned

import zeroxla
from zeroxla.mesh.machines import Link
from zeroxla.pipeline.make_schedule import NAMES
from zeroxla.planning.simulation import full_ticks

DEVICE = made_device(1e12, bytes_per_s=1e20, platform="tpu", efficiency=0.5)
LINK = Link(name="wire", bytes_per_s=1e18, latency_s=0.0, of="device", source="a test")


@functools.cache
def seconds(name, p, m):
    # As many layers in every stage: the head, which each tick waits for, is as small a part of it.
    model = Perceptrons(layers=4 * p, width=64, hidden=256)
    return zeroxla.plan(
        zeroxla.Pipeline.from_model(model, schedule=name),
        {"pipe": p, "node": 1, "device": 1},
        {"tokens": jax.ShapeDtypeStruct((m, 33), jnp.int32)},
        microbatches=m,
        weights="step",
        device=DEVICE,
        link=LINK,
    ).time.seconds


@pytest.mark.parametrize(
    ("name", "p", "m", "want"),
    [
        # In lockstep (m + p - 1)(F + B), with a forward and a backward in a full tick.
        ("1f1b", 2, 8, 9),
        ("1f1b", 4, 8, 11),
        # As long, 4 (m + p - 1), with one op in a tick; a full tick is a backward, which takes 3.
        ("gpipe", 2, 8, 9 * 4 / 3),
        ("gpipe", 4, 16, 19 * 4 / 3),
        # (m + (p - 1) / 2)(F + B), and a full tick has one of two chunks.
        ("interleaved", 2, 8, 17),
        ("interleaved", 4, 8, 19),
        # 3 m + 2(p - 1) ticks. In all but 6 of them some stage has an input gradient, which takes 2
        # and is a full tick.
        ("zb-h1", 4, 8, (30 * 2 - 6) / 2),
    ],
)
def test_full_ticks_take_as_long_as_the_schedule(name, p, m, want):
    schedule = zeroxla.make_schedule(name, p, m)
    assert full_ticks(schedule, forward_again=True) == pytest.approx(want)


def test_a_tick_of_zb_v_is_a_third_of_one_with_three_conditionals():
    schedule = zeroxla.make_schedule("zb-v", 4, 16)
    assert 3 * full_ticks(schedule, forward_again=False) == pytest.approx(schedule.ticks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_time_grows_with_micro_batches_and_stages_minus_one(name):
    """What is done once a step aside, it is (m + p - 1) times a forward and a backward."""
    few, some, many = (seconds(name, 2, m) for m in (4, 8, 16))
    assert (many - some) / (some - few) == pytest.approx(2, rel=0.001)
    assert many / few == pytest.approx(17 / 5, rel=0.03)


def test_gpipe_takes_as_long_as_1f1b():
    """Its ticks have one op, and are planned as backwards."""
    assert seconds("gpipe", 2, 8) == pytest.approx(seconds("1f1b", 2, 8), rel=0.02)


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_chunks_halve_the_bubble(p):
    found = seconds("interleaved", p, 8) / seconds("1f1b", p, 8)
    assert found == pytest.approx((8 + (p - 1) / 2) / (8 + p - 1), rel=0.04)
    assert found < 1


QUICK = ("1f1b", "gpipe", "interleaved", "zb-v")


@pytest.mark.parametrize("name", thinned(QUICK, slow=[name for name in NAMES if name not in QUICK]))
def test_no_schedule_is_far_from_the_others(name):
    """A rank has m micro-batches; and 1F1B takes the time of m + 1."""
    ratio = seconds(name, 2, 8) / seconds("1f1b", 2, 8)
    assert 8 / 9 < ratio < 2
