"""The bytes that a pipelined step sends, as `inspect.comms` counts them, against a count by
hand."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from tools.inspect import in_both_forms
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Pipeline, ZeroConfig
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, ROWS, MICROBATCHES = 16, 2, 8
LEAF = 4 * WIDTH * WIDTH  # bytes
BOUNDARY = 4 * ROWS * WIDTH  # of what one device sends to the next stage


def lowered(*, pipe, nodes, devices, layers, **options):
    """Return the lowered step of `layers` equal layers, and the mesh."""
    weights = options.pop("weights", "step")
    pipeline = Pipeline(
        [nn.Dense(WIDTH, use_bias=False) for _ in range(layers)],
        lambda outputs, batch: jnp.mean((outputs - batch["y"]) ** 2),
        inputs=lambda batch: batch["x"],
        partition="uniform",
        **options,
    )
    mesh = zeroxla.make_mesh(pipe=pipe, nodes=nodes, devices_per_node=devices)
    step = zeroxla.make_step(
        pipeline,
        mesh,
        optax.sgd(1e-2),
        config=ZeroConfig(persistence_threshold=0),
        microbatches=MICROBATCHES,
        weights=weights,
    )
    x = jax.ShapeDtypeStruct((MICROBATCHES * nodes * devices * ROWS, WIDTH), jnp.float32)
    batch = {"x": x, "y": x}
    return step.lower(step.abstract_state(batch), batch), mesh


def reports(**options):
    """Return the reports of the lowered and the compiled step."""
    return in_both_forms(*lowered(**options))


@pytest.mark.parametrize(
    ("options", "layers", "sends"),
    [
        ({}, 4, 2 * (MICROBATCHES + 2 * 3)),
        # Stages go down the ranks and up again: both kinds of arrays go both ways.
        ({"schedule": "zb-v"}, 8, 4 * (6 * MICROBATCHES + 3 + 1)),
        *thinned(
            [],
            slow=[
                ({"memory": "low"}, 4, 2 * 2 * (MICROBATCHES + 3)),
                ({"schedule": "gpipe"}, 4, 2 * 2 * (MICROBATCHES + 3)),
                ({"schedule": "zb-h1"}, 4, 2 * (3 * MICROBATCHES + 2 * 3)),
                ({"schedule": "interleaved", "chunks": 3}, 12, 2 * (3 * MICROBATCHES + 3 * 4 + 2)),
            ],
            rows=True,
        ),
    ],
    ids=["1f1b", "zb-v", "1f1b low", "gpipe", "zb-h1", "interleaved"],
)
def test_a_boundary_goes_down_and_up_in_every_tick(options, layers, sends):
    for report in reports(pipe=4, nodes=1, devices=2, layers=layers, **options):
        (row,) = [r for r in report.rows if r.phase == "send"]
        assert (row.axis, row.kind, row.dtype) == ("pipe", "collective-permute", "f32")
        assert (row.count, row.conditional, row.group_size) == (sends, False, 2)
        assert row.received_bytes == sends * BOUNDARY
        # Both devices of a stage send, to another host.
        assert row.cross_host_bytes == 2 * row.received_bytes


@pytest.mark.parametrize(
    ("options", "in_a_tick"),
    [({}, 2), ({"memory": "low"}, 1), ({"schedule": "zb-h1"}, 1), ({"schedule": "zb-v"}, 1)],
    ids=["1f1b", "1f1b low", "zb-h1", "zb-v"],
)
def test_a_tick_has_one_conditional_unless_ranks_do_two_ops_in_it(options, in_a_tick):
    """Two more are at the ends of the step: gathers before the ticks, reduces after them."""
    program, _ = lowered(pipe=2, nodes=1, devices=2, layers=4, **options)
    assert program.as_text().count("stablehlo.case") == in_a_tick + 2


def test_leaves_move_once_in_a_step_and_gather_inside_their_stages():
    for report in reports(pipe=2, nodes=2, devices=2, layers=6):
        mine = 3 * LEAF  # of a stage, which four devices share
        (move,) = [r for r in report.rows if r.phase == "move"]
        assert (move.axis, move.kind, move.conditional) == ("pipe", "all-to-all", False)
        # There and back: of its quarter of a stage's leaves a device stores half itself.
        assert move.received_bytes == 2 * (mine / 4) / 2
        assert move.cross_host_bytes == 2 * move.received_bytes

        for phase, kind in (("forward gather", "all-gather"), ("reduce", "reduce-scatter")):
            found = {r.axis: r for r in report.rows if r.phase == phase}
            assert set(found) == {"node", "device"}
            assert {r.kind for r in found.values()} == {kind}
            # Of the two stages, which are branches of one program, a device is in one.
            assert all(r.conditional and r.count == 1 for r in found.values())
            assert found["node"].received_bytes == mine / 4
            assert found["device"].received_bytes == mine / 2
            # The two devices of a node of a stage.
            assert found["node"].cross_host_bytes == 2 * found["node"].received_bytes
            assert found["device"].cross_host_bytes == 0
        assert report.count(phase="backward gather") == 0


def test_neither_tokens_nor_labels_travel():
    """Between three stages of a language model go activations and their gradients alone."""
    model, rows, length = GPT.tiny(layers=2), 2, 12
    mesh = zeroxla.make_mesh(pipe=3, nodes=1, devices_per_node=2)
    step = zeroxla.make_step(
        Pipeline.from_model(model), mesh, optax.sgd(1e-2), microbatches=MICROBATCHES
    )
    batch = {"tokens": jax.ShapeDtypeStruct((MICROBATCHES * 2 * rows, length + 1), jnp.int32)}
    report = zeroxla.inspect.comms(step.lower(step.abstract_state(batch), batch), mesh)
    (sent,) = [r for r in report.rows if r.phase == "send"]
    ticks = MICROBATCHES + 2 * 2
    assert sent.dtype == "f32"
    assert sent.received_bytes == 2 * ticks * 4 * rows * length * model.width
    assert {r.dtype for r in report.rows if r.axis == "pipe"} == {"f32"}


def test_gathers_in_ticks_count_for_the_heaviest_stage():
    ticks = MICROBATCHES + 2
    for report in reports(pipe=2, nodes=1, devices=2, layers=6, weights="tick"):
        half = 3 * LEAF / 2  # what a device receives of all leaves of its stage
        # Every tick may hold a forward (of the first stage) and a backward, which runs it again.
        assert report.total_bytes(phase="forward gather") == 2 * ticks * half
        # The input of the first stage is the batch: nobody wants the gradient of its first layer's
        # input, so of the backward gathers the second stage has the most.
        assert report.total_bytes(phase="backward gather") == ticks * half
        assert report.total_bytes(phase="reduce") == ticks * half
        assert {r.axis for r in report.rows if "gather" in r.phase} == {"device"}
