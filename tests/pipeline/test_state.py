"""Stages of models with a state. The state and the losses equal those of the same model without
stages, with as many micro-batches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.cut_models import Fitted, ResNet, pictures, vectors
from tools.pipeline_equality import SCHEDULES
from tools.pipelines import step_of
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Pipeline, TiedLayer

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(4)
MICROBATCHES = 4


class Running(nn.Module):
    """A product scaled by a running norm of its results, which the next micro-batch divides by."""

    @nn.compact
    def __call__(self, x, train):
        norm = self.variable("stats", "norm", jnp.ones, ())
        count = self.variable("stats", "count", jnp.zeros, (), jnp.int32)
        y = nn.Dense(8)(x) / norm.value
        if train:
            norm.value = 0.5 * norm.value + jnp.sqrt(jnp.mean(jnp.square(y)))
            count.value = count.value + 1
        return x + jnp.tanh(y)


class RunningBlocks(Fitted):
    """Blocks whose results depend on the state."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(4):
            x = Running()(x, train)
        return nn.Dense(1)(x)


class Remembering(Fitted):
    """A product with a state. Its weight gradient reads the state, which has changed by then."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Dense(8)(x)
        mean = self.variable("stats", "mean", jnp.ones, (8,))
        y = x + self.param("kernel", nn.initializers.ones, (8, 8)) @ mean.value
        if train:
            mean.value = 0.5 * mean.value + jnp.mean(x.reshape(-1, 8), axis=0)
        return nn.Dense(1)(y)


class Norm(nn.Module):
    """A batch norm that is told whether it is trained."""

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train)(x)


def listed(**options):
    layers = [nn.Conv(4, (3, 3)), Norm(), nn.relu, nn.Conv(4, (3, 3)), Norm(), nn.Dense(1)]
    loss = lambda y, b: jnp.mean((y[..., 0] - b["y"]) ** 2)  # noqa: E731
    return Pipeline(layers, loss, inputs=lambda batch: batch["x"], **options)


class ScannedNorms(Fitted):
    """A loop over blocks with batch statistics."""

    @nn.compact
    def __call__(self, x, train):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.Dense(8)(x)
                return nn.BatchNorm(use_running_average=not train)(x) + x, None

        loop = nn.scan(
            Block,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=4,
        )
        return nn.Dense(1)(loop()(x, None)[0])


CASES = {
    "resnet": (functools.partial(Pipeline.from_model, ResNet()), pictures),
    "listed": (listed, pictures),
    "scanned": (functools.partial(Pipeline.from_model, ScannedNorms()), vectors),
    "remembering": (functools.partial(Pipeline.from_model, Remembering()), vectors),
    "read in forward": (functools.partial(Pipeline.from_model, RunningBlocks()), vectors),
}


@pytest.mark.parametrize(
    ("model", "pipe", "schedule"),
    thinned(
        [("remembering", 2, "zb-h1")],
        slow=[
            ("scanned", 2, "1f1b"),
            ("read in forward", 4, "zb-h1"),
            ("resnet", 2, "1f1b"),
            ("resnet", 4, "1f1b"),
            ("resnet", 2, "gpipe"),
            ("resnet", 2, "zb-h1"),
            ("listed", 2, "1f1b"),
            ("read in forward", 2, "1f1b"),
            ("read in forward", 2, "gpipe"),
            ("read in forward", 2, "interleaved"),
            ("read in forward", 2, "1f1b, activations"),
            ("resnet", 2, "1f1b, activations"),
            ("scanned", 2, "zb-v"),
            ("listed", 2, "dualpipev"),
        ],
        rows=True,
    ),
)
def test_losses_and_state_are_those_without_stages(model, pipe, schedule):
    make, batch_of = CASES[model]
    staged, whole = make(**SCHEDULES[schedule]), make()
    optimizer = optax.sgd(0.05)
    steps = [
        step_of(staged, pipe, 1, 2, MICROBATCHES, optimizer=optimizer),
        step_of(whole, 1, 1, 2, MICROBATCHES, optimizer=optimizer),
    ]
    rows = 4 * MICROBATCHES
    batches = [batch_of(rows + 6 * i) for i in range(2)]
    batches = [jax.tree.map(lambda x: x[:rows], batch) for batch in batches]
    found = []
    for step in steps:
        state, losses = step.init(KEY, batches[0]), []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        losses.append(step.eval(state, batches[0])["loss"])
        found.append((losses, state.model_state, zeroxla.full_params(state)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-6)


def test_a_layer_with_a_state_that_two_stages_share_is_refused():
    class Shared(Fitted):
        def setup(self):
            self.norm, self.a, self.b = Running(), nn.Dense(8), nn.Dense(1)

        def __call__(self, x, train):
            return self.b(self.norm(self.a(self.norm(x, train)), train))

    step = step_of(Pipeline.from_model(Shared(), partition="uniform"), 2, 1, 1, 2)
    with pytest.raises(NotImplementedError, match="of the model's state"):
        step.init(KEY, vectors(4))


def test_a_tied_layer_with_a_state_in_two_stages_is_refused():
    """Of a list, it is seen when the stages are traced."""
    norm = TiedLayer("norm", Norm())
    layers = [norm, nn.Dense(8), nn.Dense(8), norm]
    loss = lambda y, b: jnp.mean((y[..., 0] - b["y"]) ** 2)  # noqa: E731
    pipeline = Pipeline(layers, loss, inputs=lambda batch: batch["x"], partition="uniform")
    step = step_of(pipeline, 3, 1, 1, 2)
    state = step.init(KEY, vectors(4))
    with pytest.raises(NotImplementedError, match=r"stages \[0, 2\] change one leaf .*norm"):
        step(state, vectors(4))


def test_scales_that_backward_overwrites_are_refused():
    class Scaled(Fitted):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(1)(nn.Dense(16, dot_general_cls=nn.Fp8DotGeneral)(x))

    step = step_of(Pipeline.from_model(Scaled()), 2, 1, 1, 2)
    with pytest.raises(NotImplementedError, match=r"overwrites '.*of the model's state"):
        step.init(KEY, vectors(4))
