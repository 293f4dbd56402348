"""Wires inside stages carry and remember the same as without stages."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from tools.checkpoints import assert_same, logical
from tools.pipeline_equality import KEY, tokens
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Checkpointer, Feedback, Pipeline, WireFormat, ZeroConfig
from zeroxla.models import GPT
from zeroxla.pipeline.stage_wire_state import StagesWireState

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = {"persistence_threshold": 0, "quantize_threshold": 1000}
INT8 = WireFormat(bits=8, block=64)
KEPT = ZeroConfig(  # what zeropp_min keeps, in formats that compile fast
    hpz_size="node",
    weight_differences=INT8,
    gradient_wire=INT8,
    inter_node_reduce="step",
    error_feedback=Feedback(),
    **SMALL,
)
BATCH = tokens(16)


def step_of(config, weights=None, *, pipe=2, **options):
    """GPT on two nodes of two devices, in stages unless `weights` is None."""
    model = GPT.tiny(layers=4)
    if weights is None:
        mesh = zeroxla.make_mesh(nodes=2, devices_per_node=2)
        return zeroxla.make_step(model, mesh, optax.adam(1e-2), config=config, microbatches=2)
    mesh = zeroxla.make_mesh(pipe=pipe, nodes=2, devices_per_node=2)
    pipeline = Pipeline.from_model(model, **options)
    return zeroxla.make_step(
        pipeline, mesh, optax.adam(1e-2), config=config, microbatches=2, weights=weights
    )


@functools.cache
def gradients(config, weights=None):
    """Of the loss of BATCH, as NumPy arrays."""
    step = step_of(config, weights)
    grads = step.grad(step.init(KEY, BATCH), BATCH)[1]
    return [np.asarray(g) for g in jax.tree.leaves(grads)]


def losses(step, state, steps):
    found = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return state, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "wires"),
    [
        ("tick", {"weight_wire": INT8, "gradient_wire": INT8}),
        ("step", {"weight_wire": INT8}),
    ],
)
def test_what_a_stage_sends_is_what_the_whole_model_does(weights, wires):
    """The same blocks are rounded alike: a stage's shards are those of the whole model's leaves."""
    config = ZeroConfig(**wires, **SMALL)
    found, want = gradients(config, weights), gradients(config)
    exact = gradients(ZeroConfig(**SMALL))
    for mine, like, right in zip(found, want, exact, strict=True):
        np.testing.assert_allclose(mine, like, atol=5e-6 * np.abs(like).max())
        assert np.linalg.norm(mine - right) > 1e-4 * np.linalg.norm(right)


@pytest.mark.slow
def test_gradients_that_are_reduced_once_lose_once():
    """With `weights="step"` micro-batches are summed before they are quantized."""
    config, exact = ZeroConfig(gradient_wire=INT8, **SMALL), gradients(ZeroConfig(**SMALL))
    errors = [
        np.linalg.norm(mine - right) / np.linalg.norm(right)
        for mine, right in zip(gradients(config, "step"), exact, strict=True)
    ]
    assert 1e-3 < max(errors) < 0.015  # two hops of 8 bits, some 0.6 % each
    step = step_of(config, "step")
    lowered = step.lower(step.abstract_state(BATCH), BATCH)
    assert "u8" in {row.dtype for row in zeroxla.inspect.comms(lowered, step.mesh).rows}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["tick", pytest.param("step", marks=pytest.mark.slow)])
def test_copies_and_errors_are_kept_by_stage(weights, tmp_path):
    step = step_of(KEPT, weights)
    state, found = losses(step, step.init(KEY, BATCH), 5)
    before = jax.tree.map(np.array, state.params)
    state, last = losses(step, state, 1)
    assert last[0] < found[0] - 0.3
    wires = state.wire_state
    assert isinstance(wires, StagesWireState)
    assert wires.boundaries == step.describe().boundaries
    # What stages * devices hold of the copies is what the quantized leaves have, once per node.
    quantized = [x for x in jax.tree.leaves(before) if x.ndim == 3]
    assert sum(x.size for x in wires.copies) == sum(x.size for x in quantized)
    assert all(np.any(np.asarray(x)) for x in (*wires.copies, *wires.errors))
    # The copies hold the weights that the step began with, to the rounding of the differences.
    held = np.sort(np.concatenate([np.asarray(x, np.float32).ravel() for x in wires.copies]))
    right = np.sort(np.concatenate([np.asarray(x).ravel() for x in quantized]))
    assert np.linalg.norm(held - right) < 0.003 * np.linalg.norm(right)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(6, state)
        kept = logical(state)
        _, after = losses(step, state, 2)
        again = checkpointer.restore(step, 6).state
        assert_same(logical(again), kept)
        assert losses(step, again, 2)[1] == after


@pytest.mark.slow
def test_wires_start_anew_with_another_cut(tmp_path):
    step, other = step_of(KEPT, "tick"), step_of(KEPT, "tick", partition=[0, 3, 7])
    state, _ = losses(step, step.init(KEY, BATCH), 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        _, after = losses(step, state, 2)
        other.abstract_state(BATCH)
        with pytest.warns(UserWarning, match="what wires remember"):
            again = checkpointer.restore(other, 2).state
    assert again.wire_state is None
    np.testing.assert_allclose(losses(other, again, 2)[1], after, rtol=0.01)


def test_wires_of_another_cut_do_not_fit():
    one, two = (
        StagesWireState(copies=[np.zeros(3)], errors=[], boundaries=cut, ranks=(0, 1))
        for cut in ((0, 1, 4), (0, 2, 4))
    )
    assert one.fits(dataclasses.replace(one))
    assert not one.fits(two)
    assert one.keeping(two) is not two


@pytest.mark.slow
def test_a_config_may_change_between_steps():
    first = step_of(ZeroConfig(accumulate=2, **SMALL), "step")
    plain = first.init(KEY, BATCH)
    state = first.init(KEY, BATCH)
    wired = dataclasses.replace(KEPT, accumulate=2)
    for config, has in ((wired, True), (wired, True), (first.config, False)):
        state, metrics = first.with_config(config)(state, BATCH)
        plain, expected = first(plain, BATCH)
        assert (state.wire_state is not None) == has
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["step", "tick"])
def test_stochastic_rounding_repeats_and_evaluates(weights):
    wire = WireFormat(bits=8, block=64, rounding="stochastic")
    step = step_of(ZeroConfig(weight_wire=wire, gradient_wire=wire, **SMALL), weights)
    state, found = losses(step, step.init(KEY, BATCH), 3)
    assert losses(step, step.init(KEY, BATCH), 3)[1] == found
    other = dataclasses.replace(step.init(KEY, BATCH), key=jax.random.key(5))
    assert losses(step, other, 3)[1] != found  # the model itself draws nothing
    assert float(step.eval(state, BATCH)["loss"]) < found[0]
