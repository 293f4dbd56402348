"""Rows of several documents over the axes of a mesh, stages and micro-batches."""

import jax
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Pipeline, ZeroConfig, make_step
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH, ROWS = 32, 8

MODELS = {
    "gpt": lambda: GPT.tiny(attention_block=8),
    "llama": lambda: Llama.tiny(attention_block=8),
}
MESHES = {
    "tensor": {"devices_per_node": 4, "tensor": 2},
    "context": {"devices_per_node": 4, "context": 2},
    "stages": {"devices_per_node": 1, "pipe": 2},
    "micro-batches": {"devices_per_node": 2},
}
CASES = [(model, mesh) for model in MODELS for mesh in MESHES]
QUICK = [("gpt", "micro-batches")]


def packed():
    """Documents of several lengths; their last tokens have no target."""
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)}
    ends = np.sort(rng.choice(np.arange(3, LENGTH - 3), (ROWS, 3)), axis=1)
    places = np.arange(LENGTH)
    batch["segments"] = 1 + (places[None, None] >= ends[:, :, None]).sum(axis=1).astype(np.int32)
    starts = np.where(np.diff(batch["segments"], prepend=0, axis=1) > 0, places, 0)
    batch["positions"] = (places - np.maximum.accumulate(starts, axis=1)).astype(np.int32)
    following = np.pad(batch["segments"][:, 1:], [(0, 0), (0, 1)], mode="edge")
    batch["mask"] = (following == batch["segments"]).astype(np.float32)
    return batch


def run(model, count, micro=1, pipe=1, **axes):
    built = MODELS[model]()
    if pipe > 1:
        built, axes = Pipeline.from_model(built), {**axes, "pipe": pipe}
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:count], **axes)
    config = ZeroConfig(persistence_threshold=0, accumulate=micro)
    step = make_step(built, mesh, optax.sgd(0.1), config=config)
    state = step.init(jax.random.key(0), packed())
    loss, grads = step.grad(state, packed())
    return float(loss), np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])


@pytest.mark.parametrize(
    ("model", "mesh"), thinned(QUICK, slow=[x for x in CASES if x not in QUICK], rows=True)
)
def test_packed_rows_have_the_same_gradients_everywhere(model, mesh):
    axes = dict(MESHES[mesh])
    count = 2 if mesh in ("stages", "micro-batches") else 4
    more = {"micro": 4} if mesh in ("stages", "micro-batches") else {}
    (loss, wanted), (found_loss, found) = (
        run(model, 1, devices_per_node=1),
        run(model, count, **more, **axes),
    )
    np.testing.assert_allclose(found_loss, loss, rtol=2e-6)
    assert np.linalg.norm(found - wanted) < 5e-6 * np.linalg.norm(wanted)


def test_segments_change_the_loss():
    """Else the test above would show nothing."""
    batch = packed()
    step = make_step(GPT.tiny(), zeroxla.make_mesh(nodes=1, devices=jax.devices()[:1]))
    state = step.init(jax.random.key(0), batch)
    one = {**batch, "segments": np.ones_like(batch["segments"])}
    assert abs(step.eval(state, batch)["loss"] - step.eval(state, one)["loss"]) > 1e-4
