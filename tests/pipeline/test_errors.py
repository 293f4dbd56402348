"""Bad options, models, batches and states of pipelines, and the errors for them."""

import types

import flax.linen as nn
import jax
import numpy as np
import pytest
from tools.pipeline_equality import KEY, listed, tokens
from tools.pipelines import FAST, MODELS, step_of
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Pipeline, Profile, TiedLayer
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pipeline([], None), "a pipeline needs a layer"),
        (lambda: listed(schedule="round"), "schedule 'round' is unknown"),
        (lambda: listed(schedule="gpipe", memory="low"), "memory='low' has no effect"),
        (lambda: listed(schedule="1f1b", chunks=2), "chunks=2"),
        (lambda: listed(schedule="interleaved", chunks=1), "chunks=1"),
        (lambda: listed(stash="everything"), "stash='everything'; take"),
        (lambda: listed(remat=0), "remat=0; give a number of layers"),
        (lambda: Pipeline([nn.Dense], None), "layer 0 is the class Dense"),
        (lambda: Profile(measure=True, machine=FAST), "measured times need no machine"),
        (lambda: step_of(listed(), 2, 1, 1, 2, weights="never"), "weights='never'; use"),
        (lambda: Pipeline([3], None), "layer 0 is a int"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (lambda: listed(partition=[0, 9]), "stages have 3"),
        (lambda: listed(partition="type:Conv"), "matches no layer"),
        (lambda: Pipeline([nn.Dense(3)], lambda y, b: y.mean()), "1 layers do not fill 2 stages"),
        (
            lambda: Pipeline([lambda x: {"a": x}, nn.Dense(3)], lambda y, b: y.mean()),
            "layer 0 .* one array or a tuple of arrays",
        ),
        (
            lambda: Pipeline(
                [TiedLayer("a", nn.Dense(8)), TiedLayer("a", nn.Dense(9))], lambda y, b: y.mean()
            ),
            "tied layer 'a', layer 1, has leaves of the shapes",
        ),
    ],
)
def test_models_that_cannot_be_cut(pipeline, message):
    made = pipeline()
    batch = np.ones((4, 8), np.float32)
    if "stages have" in message or "matches no" in message:
        batch = tokens(4)
    step = step_of(made, 2, 1, 1, 2)
    with pytest.raises(ValueError, match=message):
        step.grad(step.init(KEY, batch), batch)


def test_a_first_stage_that_would_be_empty():
    """Of a model with blocks in a loop: its embeddings are where the tokens are."""
    pipeline = Pipeline.from_model(GPT.tiny(), partition=[0, 0, 5], allow_empty=True)
    with pytest.raises(ValueError, match="leave stage 0 without a layer"):
        step_of(pipeline, 2, 1, 1, 2).init(KEY, tokens(4))


def test_a_profile_for_a_machine_that_is_not_known(monkeypatch):
    kind = types.SimpleNamespace(device_kind="abacus")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [kind])
    with pytest.raises(ValueError, match="the figures of a 'abacus' are not known"):
        Profile().machine_here()


def test_a_loss_beside_that_of_the_pipeline():
    mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=1)
    with pytest.raises(ValueError, match="a Pipeline has its own loss"):
        zeroxla.make_step(listed(), mesh, loss=lambda apply, batch, train: 0.0)


def test_a_schedule_of_other_numbers():
    step = step_of(listed(schedule=zeroxla.make_schedule("gpipe", 2, 3)), 2, 1, 1, 2)
    with pytest.raises(ValueError, match="for 3 micro-batches, and there are 2; make one for"):
        step.grad(step.init(KEY, tokens(4)), tokens(4))
    step = step_of(listed(schedule=zeroxla.make_schedule("gpipe", 4, 2)), 2, 1, 1, 2)
    with pytest.raises(ValueError, match="is for pipe=4, and the mesh has pipe=2; make one for"):
        step.init(KEY, tokens(4))


def test_weights_without_stages_are_said_to_have_no_effect():
    with pytest.warns(UserWarning, match="weights='tick' has no effect"):
        step_of(listed(), 1, 1, 2, 2, weights="tick")


def test_a_mesh_of_stages_needs_a_pipeline():
    mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=1)
    with pytest.raises(ValueError, match="has pipe=2 and the model is not a pipeline"):
        zeroxla.make_step(GPT.tiny(), mesh)


def test_a_batch_that_does_not_divide():
    step = step_of(MODELS["gpt"](), 2, 1, 2, 3)
    with pytest.raises(ValueError, match="batch of 8"):
        step.init(KEY, tokens(8))
