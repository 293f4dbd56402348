"""Pipelines with adapters, with parameters in host memory, and as the state to generate from: each
against the same without stages."""

import jax
import numpy as np
import optax
import pytest
from tools import cut_models
from tools.pipeline_equality import tokens
from tools.pipelines import step_of
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine, Offload, Pipeline
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(4)
RTOL = 5e-6


def assert_same_gradients(staged, whole, batch, *, rtol=RTOL):
    """Losses, gradients and parameters after a step, of steps that begin alike."""
    found = []
    for step in (staged, whole):
        state = step.init(KEY, batch)
        loss, grads = step.grad(state, batch)
        after, _ = step(state, batch)
        found.append((loss, grads, zeroxla.full_params(after)))
    mine, others = (
        {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in found
    )
    assert mine.keys() == others.keys()
    for name, x in others.items():
        np.testing.assert_allclose(
            mine[name], x, atol=rtol * max(np.abs(x).max(), 1e-6), err_msg=name
        )


@pytest.mark.parametrize(
    ("scan", "frozen", "pipe", "weights", "schedule"),
    thinned(
        [],
        slow=[
            (False, "int8", 2, "step", "1f1b"),
            (True, None, 4, "tick", "1f1b"),
            (False, None, 4, "step", "1f1b"),
            (False, "int4", 2, "tick", "1f1b"),
            (True, "int8", 2, "step", "1f1b"),
            (True, "int4", 4, "step", "1f1b"),
            (True, "int8", 2, "tick", "1f1b"),
            (True, "int8", 2, "step", "zb-v"),
            (False, "int4", 2, "tick", "interleaved"),
        ],
        rows=True,
    ),
)
def test_adapters_learn_in_stages_as_without(scan, frozen, pipe, weights, schedule):
    model = zeroxla.lora(
        GPT.tiny(layers=4, width=64, scan=scan),
        targets=r"(attn|mlp)/.*kernel",
        rank=2,
        frozen=frozen,
    )
    optimizer = optax.sgd(0.1)
    pipeline = Pipeline.from_model(model, schedule=schedule)
    staged = step_of(pipeline, pipe, 1, 2, 2, optimizer=optimizer, weights=weights)
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    whole = zeroxla.make_step(model, mesh, optimizer, config=config)
    assert_same_gradients(staged, whole, tokens(8), rtol=2e-5)


@pytest.mark.slow
def test_blocks_of_which_some_are_frozen():
    """They are two rows; a loop over both would train all or none."""
    model, frozen = cut_models.Unrolled(blocks=6), ("block_[0-2]/",)
    optimizer = optax.sgd(0.1)
    staged = step_of(Pipeline.from_model(model), 2, 1, 2, 2, optimizer=optimizer, frozen=frozen)
    config = zeroxla.ZeroConfig(persistence_threshold=0, frozen=frozen)
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    whole = zeroxla.make_step(model, mesh, optimizer, config=config)
    assert_same_gradients(staged, whole, cut_models.vectors(8), rtol=2e-5)


@pytest.mark.parametrize(
    ("scan", "weights", "schedule"),
    thinned(
        [],
        slow=[
            (True, "tick", "1f1b"),
            (True, "step", "1f1b"),
            (False, "step", "1f1b"),
            (True, "step", "zb-v"),
        ],
        rows=True,
    ),
)
def test_parameters_in_host_memory_change_no_bit(scan, weights, schedule):
    model, batch = GPT.tiny(layers=4, scan=scan), tokens(8)
    states = []
    for offload in (Offload(), Offload(params="host", optimizer="host")):
        pipeline = Pipeline.from_model(model, schedule=schedule)
        step = step_of(pipeline, 2, 1, 2, 2, offload=offload, weights=weights)
        state = step.init(KEY, batch)
        for _ in range(2):
            state, _ = step(state, batch)
        states.append(state)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(states[1].params)}
    assert kinds == {"pinned_host"}
    for a, b in zip(*(jax.tree.leaves((s.params, s.opt_state)) for s in states), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_parameters_on_disk_are_refused(tmp_path):
    step = step_of(
        Pipeline.from_model(GPT.tiny()), 2, 1, 1, 2, offload=Offload(params="disk", path=tmp_path)
    )
    with pytest.raises(NotImplementedError, match="params='disk'"):
        step.init(KEY, tokens(4))


@pytest.mark.parametrize(
    ("model", "pipe", "tensor", "schedule"),
    thinned(
        [],
        slow=[
            ("scanned", 4, 1, "1f1b"),
            ("unrolled", 2, 2, "1f1b"),
            ("scanned", 2, 2, "1f1b"),
            ("unrolled", 4, 2, "1f1b"),
            ("adapters", 2, 1, "1f1b"),
            ("scanned", 2, 1, "interleaved"),
        ],
        rows=True,
    ),
)
def test_a_state_of_stages_generates_the_same_tokens(model, pipe, tensor, schedule):
    """Greedily, as the same state without stages."""
    own = GPT.tiny(layers=4, scan=model != "unrolled")
    if model == "adapters":
        own = zeroxla.lora(own, targets="attn/.*kernel", rank=2, frozen="int8")
    batch = tokens(8)
    staged = step_of(Pipeline.from_model(own, schedule=schedule), pipe, 1, 2, 2)
    whole = zeroxla.make_step(own, zeroxla.make_mesh(nodes=1, devices_per_node=2), optax.adam(1e-2))
    prompts, found = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]], []
    for step in (staged, whole):
        state = step.init(KEY, batch)
        engine = HybridEngine(step, tensor=tensor)
        result = engine.generate(state, prompts, key=KEY, max_new_tokens=6, temperature=0)
        found.append(np.asarray(result.tokens))
    np.testing.assert_array_equal(*found)
