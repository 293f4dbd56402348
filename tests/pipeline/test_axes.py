"""Pipelines on meshes with tensor, context and expert: every stage is a part of the split loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.equality import GRADIENT_TOLERANCE
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla
from zeroxla import Pipeline, Profile, ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama, Mixtral
from zeroxla.models.losses import next_token_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH, MICROBATCHES = 16, 4
MODELS = {
    "perceptrons": Perceptrons,
    "GPT": lambda: GPT.tiny(layers=4),
    "GPT, written out": lambda: GPT.tiny(layers=4, scan=False),
    "GPT, computed again": lambda: GPT.tiny(layers=4, remat=True),
    "GPT, in blocks": lambda: GPT.tiny(layers=4, attention_block=4, loss_chunk=4),
    "GPT, odd layers": lambda: GPT.tiny(layers=3, vocab=61),
    "Llama": lambda: Llama.tiny(heads=8, kv_heads=4, width=64),
    "Mixtral": lambda: Mixtral.tiny(),
}
TENSOR, BOTH = {"pipe": 2, "nodes": 1, "tensor": 2}, {"tensor": 2, "context": 2}
CONTEXT = {"pipe": 2, "nodes": 2, "context": 2}
CHUNKS = {"schedule": "interleaved", "chunks": 2, "stash": "activations"}
ROWS = [
    ("perceptrons", TENSOR, {}, "step"),
    ("GPT", TENSOR, {}, "step"),
    ("GPT, odd layers", TENSOR, {}, "step"),
    ("GPT, written out", TENSOR, {}, "step"),
    ("GPT, in blocks", CONTEXT, {}, "tick"),
    ("Llama", {"pipe": 2, "nodes": 1, **BOTH}, {}, "tick"),
    ("Llama", {"pipe": 4, "nodes": 1, "context": 2}, {"schedule": "gpipe"}, "step"),
    ("Llama", CONTEXT, {"schedule": "zb-h1"}, "tick"),
    ("GPT", TENSOR, {"schedule": "zb-v"}, "step"),
    ("GPT", TENSOR, CHUNKS, "tick"),
    ("GPT, computed again", TENSOR, {"schedule": "dualpipev"}, "step"),
    ("GPT, computed again", CONTEXT, {"memory": "low"}, "tick"),
    ("Mixtral", {"pipe": 2, "nodes": 1, "expert": 2}, {}, "step"),
]
QUICK = 1


def tokens(rows):
    return {"tokens": np.random.default_rng(0).integers(0, 61, (rows, LENGTH + 1), np.int32)}


def step_of(model, mesh, weights="step", **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    return zeroxla.make_step(
        model, mesh, optax.sgd(0.1), config=config, weights=weights, microbatches=MICROBATCHES
    )


@pytest.mark.parametrize(
    ("name", "axes", "how", "weights"),
    thinned(ROWS[:QUICK], slow=ROWS[QUICK:], rows=True),
)
def test_gradients_equal_those_of_the_whole_model(name, axes, how, weights):
    mesh = zeroxla.make_mesh(**axes)
    batch = tokens(MICROBATCHES * mesh.shape["node"] * mesh.shape["device"])
    step = step_of(Pipeline.from_model(MODELS[name](), **how), mesh, weights)
    state = step.init(jax.random.key(0), batch)
    loss, gradients = step.grad(state, batch)
    adapted = adapt(MODELS[name]())
    whole = jax.tree.map(np.asarray, zeroxla.full_params(state))

    def mean(params):
        # A mixture's loss is no mean over rows: experts are balanced within a device's micro-batch.
        def of_row(row):
            return adapted.loss(params, {}, {"tokens": row[None]}, jax.random.key(1), train=True)[0]

        return jnp.mean(jax.lax.map(of_row, jnp.asarray(batch["tokens"])))

    want, expected = jax.jit(jax.value_and_grad(mean))(whole)
    assert abs(float(loss) / float(want) - 1) < 1e-6
    assert worst(relative_errors(gradients, expected))[1] <= GRADIENT_TOLERANCE
    assert abs(float(step.eval(state, batch)["loss"]) / float(want) - 1) < 1e-6


def test_leaves_are_stored_by_stage_over_all_devices_of_the_stage():
    mesh, batch = zeroxla.make_mesh(**TENSOR), tokens(8)
    step = step_of(Pipeline.from_model(MODELS["perceptrons"]()), mesh)
    shapes = step.abstract_state(batch)
    kernel, bias = (shapes.params["h"]["Dense_0"][name] for name in ("kernel", "bias"))
    for x in (kernel, bias):
        assert x.sharding.shard_shape(x.shape)[0] == 2  # the layers of a stage
        assert np.prod(x.sharding.shard_shape(x.shape)) == np.prod(x.shape) / 8
    text = str(step.describe())
    assert "6 layers in 2 stages" in text
    assert "tensor=2: how devices hold arrays" in text
    assert "Of a leaf that an axis splits, the parameters of one part are counted." in text


def test_stages_are_cut_from_the_trace_of_the_whole_loss():
    """A list of layers is called layer by layer, and measured layers know no axes."""
    model = Perceptrons()
    listed = Pipeline(
        [model],
        lambda logits, batch: next_token_loss(logits, batch)[0],
        inputs=lambda batch: batch["tokens"][:, :-1],
    )
    with pytest.raises(NotImplementedError, match=r"list of layers .* Pipeline\.from_model"):
        step_of(listed, zeroxla.make_mesh(**TENSOR)).abstract_state(tokens(8))
    profiled = Pipeline.from_model(model, partition=Profile())
    with pytest.raises(NotImplementedError, match="layers are measured on one device"):
        step_of(profiled, zeroxla.make_mesh(**TENSOR)).abstract_state(tokens(8))
