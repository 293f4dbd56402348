"""Generation from states on meshes with tensor, context and expert."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine, Pipeline, ZeroConfig
from zeroxla.hybrid.device_order import DeviceOrder
from zeroxla.models import GPT, Llama
from zeroxla.rlhf.make import make_loop
from zeroxla.rlhf.settings import Settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)}
MODELS = {
    "gpt": GPT.tiny,
    "llama": lambda: Llama.tiny(heads=8, kv_heads=4, width=64),
    "lora int8": lambda: zeroxla.lora(GPT.tiny(), targets="kernel$", rank=4, frozen="int8"),
}
ROWS = [
    ("gpt", {"nodes": 2, "tensor": 2}, 4),
    ("llama", {"nodes": 2, "tensor": 2, "context": 2}, 1),
    ("gpt", {"pipe": 2, "nodes": 1, "tensor": 2}, 2),
    ("lora int8", {"nodes": 1, "tensor": 4}, 2),
]


def step_of(model, mesh):
    if mesh.shape.get("pipe", 1) > 1:
        model = Pipeline.from_model(model)
    return zeroxla.make_step(
        model, mesh, optax.sgd(0.1), config=ZeroConfig(persistence_threshold=0)
    )


@pytest.mark.slow
def test_scores_are_those_of_the_step():
    step = step_of(GPT.tiny(), zeroxla.make_mesh(nodes=2, tensor=2))
    state = step.init(jax.random.key(0), BATCH)
    scores = HybridEngine(step, tensor=4, max_length=32).logprobs(state, BATCH["tokens"])
    loss = float(step.eval(state, BATCH)["loss"])
    np.testing.assert_allclose(-np.mean(scores), loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "tensor"), ROWS)
def test_an_engine_generates_as_without_axes(name, axes, tensor):
    found = []
    for lengths, parts in ((axes, tensor), ({"nodes": 2}, 1)):
        step = step_of(MODELS[name](), zeroxla.make_mesh(**lengths))
        state = step.init(jax.random.key(0), BATCH)
        engine = HybridEngine(step, tensor=parts, max_length=32)
        scores = engine.logprobs(state, BATCH["tokens"])
        key = jax.random.key(1)
        drawn = engine.generate(state, [[1, 2, 3], [4]], key=key, max_new_tokens=4)
        found.append((scores, drawn.tokens))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "axes",
    thinned(
        [{"pipe": 2, "nodes": 2, "tensor": 2}],
        slow=[{"nodes": 2, "tensor": 2, "context": 2}],
    ),
)
def test_shards_move_to_the_devices_of_the_plain_order(axes):
    """The arrays are the same, and the devices of a node lie in the order of the mesh."""
    mesh = zeroxla.make_mesh(**axes)
    step = step_of(GPT.tiny(), mesh)
    shapes = step.abstract_state(BATCH)
    leaves = [
        jax.device_put(np.arange(x.size, dtype=np.float32).reshape(x.shape), x.sharding)
        for x in jax.tree.leaves(shapes.params)
    ]
    order = DeviceOrder(step.mesh, shapes.placements[0])
    inside = [axis for axis in mesh.axis_names if axis not in ("pipe", "node")]
    for old, new, placement in zip(leaves, order.apply(leaves), order.plain, strict=True):
        np.testing.assert_array_equal(old, new)
        assert placement.parts == ()
        last = ("pipe",) if "pipe" in placement.axes else ()
        wanted = dataclasses.replace(placement, axes=(*inside, "node", *last)).spec
        assert new.sharding.is_equivalent_to(NamedSharding(step.mesh, wanted), new.ndim)


@pytest.mark.slow
def test_an_iteration_of_grpo_is_that_without_axes():
    settings = Settings(prompt_length=2, new_tokens=4, rows=8, group=4)
    model, found = GPT.tiny(layers=1, width=32), []

    def small(rollouts):
        return np.mean(np.asarray(rollouts.tokens_BL) < 32, axis=1).astype(np.float32)

    for axes in ({"tensor": 2}, {}):
        mesh = zeroxla.make_mesh(nodes=1, devices_per_node=4, devices=jax.devices()[:4], **axes)
        step = zeroxla.make_step(model, mesh)
        params = step.init(jax.random.key(0), {"tokens": np.zeros((4, 9), int)}).params
        whole = jax.tree.map(np.asarray, params)
        loop = make_loop(model, mesh, settings, reward=small, optimizer=optax.sgd(0.1))
        states = loop.begin(whole, jax.random.key(0))
        for i in range(2):
            states, metrics = loop.iterate(states, [[1, 2], [3]], jax.random.key(i))
        found.append((metrics, zeroxla.full_params(states.actor)))
    assert found[0][0]["reward"] == found[1][0]["reward"]
    for a, b in zip(*(jax.tree.leaves(x) for _, x in found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
