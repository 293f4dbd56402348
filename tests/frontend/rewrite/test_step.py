"""Rewrites in a training step: on meshes with all axes, in pipelines, plans and reports."""

import jax
import numpy as np
import optax
import pytest
from tools.attention_styles import LENGTH, STYLES, batch_of
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import norm

import zeroxla
from zeroxla import Pipeline, Rewrite, ZeroConfig
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = Rewrite(attention_block=16, loss_chunk=16)
KEY = jax.random.key(0)
SCANNED, UNROLLED, NNX = "einsum, boolean mask, scanned", "window, capped, logarithm", "alibi"


def make(name, mesh, rewrite, pipeline=False):
    model = STYLES[name]()
    if pipeline:
        model = Pipeline.from_model(model)
    config = ZeroConfig(rewrite=rewrite, persistence_threshold=0)
    return zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)


def gradients(step):
    batch = batch_of(16, LENGTH)
    return step.grad(step.init(KEY, batch), batch)


def mesh_of(**lengths):
    count = int(np.prod([lengths.get(x, 1) for x in ("pipe", "nodes", "devices_per_node")]))
    return zeroxla.make_mesh(**lengths, devices=jax.devices()[:count])


MESHES = {
    "two devices": {"nodes": 1, "devices_per_node": 2},
    "ZeRO-3": {"nodes": 2, "devices_per_node": 2},
    "tensor": {"nodes": 1, "devices_per_node": 4, "tensor": 2},
    "context": {"nodes": 1, "devices_per_node": 4, "context": 2},
    "pipeline": {"nodes": 1, "devices_per_node": 2, "pipe": 2},
}
PADDED = "causal and padding"
MAY_BE_EMPTY = (PADDED, "alibi")
"""Those whose queries may keep no key, as far as the masks tell: a bias too could hide it."""
CASES = [(mesh, name) for name in (SCANNED, UNROLLED, NNX, PADDED) for mesh in MESHES]
QUICK = [("two devices", SCANNED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "name"), thinned(QUICK, slow=[x for x in CASES if x not in QUICK], rows=True)
)
def test_gradients_are_those_of_the_model_as_it_is(axes, name):
    mesh, pipeline = mesh_of(**MESHES[axes]), axes == "pipeline"
    loss, grads = gradients(make(name, mesh, None, pipeline))
    step = make(name, mesh, SMALL, pipeline)
    other_loss, other = gradients(step)
    difference = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), grads, other)
    assert abs(float(loss) - float(other_loss)) < 1e-6 * abs(float(loss))
    assert norm(difference) < 1e-6 * norm(grads)
    report = step.programs.rewrites
    kinds = {x.kind for x in report.rewritten}
    assert {"attention", "loss"} <= kinds
    branches = name in MAY_BE_EMPTY and axes in ("two devices", "ZeRO-3", "pipeline")
    assert branches == any("only if a query keeps no key" in x.reason for x in report.findings)
    text = str(step.describe())
    assert f"{len(report.rewritten)} of {len(report.findings)} found are rewritten" in text
    assert f"tools/attention_styles.py:{report.rewritten[0].line.rpartition(':')[2]}" in text


@pytest.mark.slow
def test_causal_attention_of_a_user_runs_around_a_ring():
    """Two key heads do not divide over a split of four."""
    shapes = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, batch_of(8, 4096)))
    config = ZeroConfig(rewrite=Rewrite(loss=False, norms=False))
    plan = zeroxla.plan(
        STYLES["grouped heads, remat"](), {"device": 2, "context": 4}, shapes, config=config
    )
    assert "ring" in {c.forward for c in plan.axes.reports[0].conversions}
    assert "causal attention by blocks of 512" in str(plan)


def test_a_plan_needs_less_memory():
    shapes = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, batch_of(8, 4096)))
    written, rewritten = (
        zeroxla.plan(STYLES[NNX](), {"device": 8}, shapes, config=ZeroConfig(rewrite=rewrite))
        for rewrite in (False, True)
    )
    assert written.rewrites is None
    assert rewritten.memory.activation_bytes < written.memory.activation_bytes / 4


def test_without_the_option_nothing_is_looked_for(mesh18):
    step = zeroxla.make_step(GPT.tiny(), mesh18, optax.sgd(0.1))
    step.abstract_state({"tokens": np.zeros((8, 33), np.int32)})
    assert step.programs.rewrites is None
    assert step.describe().rewrites is None


def test_a_list_of_layers_is_refused():
    import flax.linen as nn

    layers = [nn.Dense(8), nn.Dense(8)]
    model = Pipeline(layers, lambda y, batch: (y**2).mean(), inputs=lambda batch: batch["x"])
    mesh = mesh_of(pipe=2, nodes=1, devices_per_node=1)
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1), config=ZeroConfig(rewrite=True))
    with pytest.raises(NotImplementedError, match="rewrite"):
        step.init(KEY, {"x": np.zeros((4, 8), np.float32)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_block": 0}, "attention_block=0"),
        ({"loss_chunk": None}, "loss_chunk=None"),
        ({"norms": 1}, "norms=1"),
        ({"attention": False, "loss": False, "norms": False}, "looks for nothing"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        Rewrite(**options)


def test_the_option_of_a_config():
    assert ZeroConfig(rewrite=True).rewrite == Rewrite()
    assert ZeroConfig(rewrite=False).rewrite is None
    with pytest.raises(ValueError, match="rewrite='attention'"):
        ZeroConfig(rewrite="attention")
