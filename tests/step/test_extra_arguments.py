"""Optimizers that need the loss get it, wherever the update runs; line searches are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla import Offload, ZeroConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)


def pair():
    def loss(p, batch, key):
        return mse(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])

    return leaves(a=(6, 32), b=(32, 3)), loss


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=2)


def plateau():
    """The rate halves whenever the loss does not fall by a half in a step."""
    halves = contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    return optax.chain(optax.adam(0.1), optax.masked(halves, {"a": True, "b": True}))


def after_steps(mesh, **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    step = zeroxla.make_step(pair(), mesh, plateau(), config=config)
    state = step.init(KEY, vectors(16))
    for _ in range(4):
        state, metrics = step(state, vectors(16))
    scales = optax.tree_utils.tree_get_all_with_path(state.opt_state, "scale")
    return zeroxla.full_params(state), float(scales[0][1]), metrics


@pytest.fixture(scope="module")
def expected(mesh):
    return after_steps(mesh)


def test_the_loss_reaches_the_optimizer(expected):
    _, scale, _ = expected
    assert scale in (0.5, 0.25, 0.125)


@pytest.mark.parametrize(
    "offload",
    thinned(
        [Offload(optimizer="host", update="host")],
        slow=[
            Offload(optimizer="host", sub_group=8),
            Offload(optimizer="host", params="host", sub_group=8),
        ],
    ),
    ids=["on_host", "optimizer", "params"],
)
def test_and_an_update_of_what_is_on_the_host(mesh, expected, offload):
    found = after_steps(mesh, offload=offload)
    assert found[1] == expected[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found[0], expected[0])


@pytest.mark.parametrize("params", thinned([], slow=["disk", "none"]))
def test_and_an_update_of_what_is_on_disk(mesh, expected, params, tmp_path):
    offload = Offload(optimizer="disk", params=params, sub_group=8, path=tmp_path)
    found = after_steps(mesh, offload=offload)
    assert found[1] == expected[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found[0], expected[0])


def test_a_skipped_step_is_no_plateau(mesh):
    step = zeroxla.make_step(pair(), mesh, plateau())
    state = step.init(KEY, batch := vectors(16))
    spoilt = {**batch, "x": np.full_like(batch["x"], np.nan)}
    for _ in range(4):
        state, metrics = step(state, spoilt)
    assert int(metrics["skipped"]) == 4
    assert [
        float(x) for _, x in optax.tree_utils.tree_get_all_with_path(state.opt_state, "scale")
    ] == [1.0]


def test_an_optimizer_that_must_see_all_leaves(mesh):
    """Its labels have the form of the parameters, and one part of it needs a line search."""
    parts = {"line": optax.scale_by_backtracking_linesearch(5), "other": optax.sgd(0.1)}

    def labels(params):
        if any(isinstance(x, optax.MaskedNode) for x in params.values()):
            raise ValueError("a leaf is missing")
        return {"a": "other", "b": "line"}

    step = zeroxla.make_step(pair(), mesh, optax.multi_transform(parts, labels))
    with pytest.raises(ValueError, match="backtracking_linesearch needs the argument value_fn"):
        step.abstract_state(vectors(16))


def needs(*names):
    """An optimizer whose update needs further arguments."""
    text = "def update(updates, state, params=None, *, {}, **extra): return updates, state"
    scope = {}
    exec(text.format(", ".join(names)), scope)
    return optax.GradientTransformationExtraArgs(lambda params: (), scope["update"])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.lbfgs(),
            r"part scale_by_zoom_linesearch needs the argument value_fn in its update; a step has "
            r"one loss .* as optax.lbfgs\(learning_rate, linesearch=None\)",
        ),
        (
            optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
            "part scale_by_backtracking_linesearch needs the argument value_fn in its update",
        ),
        (
            needs("obj", "value", "more"),
            "needs the argument obj and more in its update; .* another",
        ),
    ],
)
def test_what_needs_more_is_refused_by_name_before_a_step(mesh, optimizer, message):
    step = zeroxla.make_step(pair(), mesh, optimizer)
    for call in (step.abstract_state, lambda batch: step.init(KEY, batch)):
        with pytest.raises(ValueError, match=message):
            call(vectors(16))


def test_arguments_that_an_update_does_not_take_are_left_out(mesh):
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -g * value, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = zeroxla.make_step(pair(), mesh, optimizer)
    state = step.init(KEY, batch := vectors(16))
    before, (loss, gradients) = zeroxla.full_params(state), step.grad(state, batch)
    state, _ = step(state, batch)
    moved = zeroxla.full_params(state)["b"] - before["b"]
    np.testing.assert_allclose(moved, -np.asarray(gradients["b"]) * float(loss), rtol=1e-4)
