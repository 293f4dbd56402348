"""What a user pins on an axis is split as they say, and the step computes the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Splits, ZeroConfig
from zeroxla.models import GPT
from zeroxla.split.holdings import Kind

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, HIDDEN = 32, 64


def init(key, batch):
    del batch
    first, second = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(first, (WIDTH, HIDDEN)) / 8},
        "down": {"kernel": jax.random.normal(second, (HIDDEN, WIDTH)) / 8},
    }


def loss(params, batch, key):
    del key
    with jax.named_scope("first"):
        hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"])
    hidden = checkpoint_name(hidden, "hidden")
    return jnp.mean((hidden @ params["down"]["kernel"]) ** 2)


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 6, WIDTH)).astype(np.float32)}


def step_of(splits=None, model=(init, loss), **axes):
    config = ZeroConfig(persistence_threshold=0, splits=splits)
    mesh = zeroxla.make_mesh(nodes=2, **(axes or {"tensor": 2}))
    return zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)


def parts_of(step, batch=None):
    """Return for each leaf the dims that an axis splits."""
    step.abstract_state(BATCH if batch is None else batch)
    (plan,) = step.programs.axes.newest.plans
    return {
        row.path: held.dim for row, (held,) in zip(step.describe().rows, plan.inputs, strict=False)
    }


def kept(step, name):
    """Return how the result of an equation is kept."""
    step.abstract_state(BATCH)
    (plan,) = step.programs.axes.newest.plans
    (way,) = (way for eq, way in plan.steps if eq.name == name)
    return way.kept[0]


PINS = {
    "nothing": ({}, {}, {"up/kernel": 1, "down/kernel": 0}),
    "rows": ({"up": 0}, {}, {"up/kernel": 0, "down/kernel": 0}),
    "columns": ({"down/kernel$": -1}, {}, {"up/kernel": 1, "down/kernel": 1}),
    "whole": ({"up": None, "down": 0}, {"hidden": 1}, {"up/kernel": None, "down/kernel": 0}),
}


@pytest.mark.parametrize("name", PINS)
def test_a_leaf_is_split_along_the_dim_that_is_named(name):
    leaves, arrays, expected = PINS[name]
    step = step_of(Splits(leaves={"tensor": leaves}, arrays={"tensor": arrays}))
    assert parts_of(step) == expected
    if name != "whole":
        return
    state = step.init(jax.random.key(0), BATCH)
    found, gradients = step.grad(state, BATCH)
    whole = jax.tree.map(np.asarray, zeroxla.full_params(state))
    want, wanted = jax.value_and_grad(loss)(whole, BATCH, None)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for mine, its in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5 * np.abs(its).max())


@pytest.mark.parametrize(
    ("pattern", "equation", "dim"),
    [
        ("hidden", "name", 1),
        ("hidden", "name", 2),
        ("hidden", "name", None),
        ("first", "tanh", -2),
        ("first", "tanh", None),
    ],
)
def test_an_array_is_held_as_its_name_or_its_scope_is_pinned(pattern, equation, dim):
    held = kept(step_of(Splits(arrays={"tensor": {pattern: dim}})), equation)
    if dim is None:
        assert held.kind is Kind.WHOLE
    else:
        assert held.dim == dim % 3


@pytest.mark.slow
def test_arrays_and_leaves_in_a_loop_are_pinned():
    """Residuals are kept whole: Megatron without sequence parallelism."""
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)}
    splits = Splits(
        leaves={"tensor": {"mlp/c_fc/kernel": -1, "wte": None}},
        arrays={"tensor": {"h/(attn|mlp)/c_proj": None, "h/ln_1": None}},
    )
    step = step_of(splits, GPT.tiny())
    parts = parts_of(step, batch)
    assert parts["h/mlp/c_fc/kernel"] == 2
    assert parts["wte/embedding"] is None
    moved = {c.forward for c in step.describe().axes[0].conversions if c.times == 2}
    assert moved - {None} == {"all-reduce"}


@pytest.mark.slow
def test_a_step_with_pins_in_a_loop_computes_the_same():
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)}
    splits = Splits(
        leaves={"tensor": {"mlp/c_fc/kernel": 1, "c_attn/kernel": -1}},
        arrays={"tensor": {"h/(attn|mlp)/c_proj": 1, "h/ln_1": None}},
    )
    results = []
    for each in (None, splits):
        step = step_of(each, GPT.tiny())
        state = step.init(jax.random.key(0), batch)
        results.append(step.grad(state, batch))
    (first, gradients), (second, others) = results
    assert abs(float(second) / float(first) - 1) < 1e-6
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(a).max()))


REFUSED = {
    "a dim that does not divide": (
        {"leaves": {"tensor": {"up": 0}}},
        {"tensor": 4},
        30,
        "tensor=4 cannot split dim 0 of the leaf 'up/kernel', float32[30,64]; what can be pinned "
        "is dim 1 or None",
    ),
    "no such dim": (
        {"leaves": {"tensor": {"up": 2}}},
        {"tensor": 2},
        32,
        "cannot split dim 2 of the leaf 'up/kernel', float32[32,64]; what can be pinned is dim 0, "
        "1 or None",
    ),
    "leaves on context": (
        {"leaves": {"context": {"up": 0}}},
        {"context": 2},
        32,
        "context=2 cannot split dim 0 of the leaf 'up/kernel', float32[32,64]; what can be pinned "
        "is None (whole)",
    ),
    "no such leaf": (
        {"leaves": {"tensor": {"upp": 0}}},
        {"tensor": 2},
        32,
        "Splits(leaves={'tensor': {'upp': 0}}) matches no leaf; there are 'down/kernel', "
        "'up/kernel'. Correct",
    ),
    "two pins of a leaf": (
        {"leaves": {"tensor": {"up": 0, "kernel": None}}},
        {"tensor": 2},
        32,
        "{'kernel': None}}) both match the leaf 'up/kernel'",
    ),
    "rows": (
        {"arrays": {"tensor": {"hidden": 0}}},
        {"tensor": 2},
        32,
        "tensor=2 cannot split dim 0 of an array that it matches, float32[2,6,64]; what can be "
        "pinned is dim 1, 2 or None",
    ),
    "no such array": (
        {"arrays": {"tensor": {"hiden": 0}}},
        {"tensor": 2},
        32,
        "matches no array: no array of the loss is named so by checkpoint_name, and none leaves "
        "such a scope. There are 'first', 'hidden'; use",
    ),
    "two pins of an array": (
        {"arrays": {"tensor": {"hidden": 1, "hid": 2}}},
        {"tensor": 2},
        32,
        "both match an array float32[2,6,64]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pin_that_cannot_be_kept_is_refused_with_what_can_be(name):
    pins, axes, width, text = REFUSED[name]

    def narrow(key, batch):
        params = init(key, batch)
        return {**params, "up": {"kernel": params["up"]["kernel"][:width]}}

    devices = 2 * axes.get("tensor", 2)
    step = step_of(Splits(**pins), (narrow, loss), **axes)
    batch = {"x": BATCH["x"][: 8 // devices * 4, :, :width]}
    with pytest.raises(ValueError, match=re.escape(text)):
        step.abstract_state(batch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"leaves": {"pipe": {"up": 0}}}, "use one of the axes"),
        ({"leaves": {"tensor": {"(": 0}}}, "is no regular expression"),
        ({"arrays": {"tensor": {"up": "0"}}}, "give the number of a dim"),
        ({"arrays": {"tensor": {"up": True}}}, "give the number of a dim"),
        ({"arrays": {"tensor": "up"}}, "give a mapping of axes"),
    ],
)
def test_pins_are_checked_when_they_are_written(options, text):
    with pytest.raises(ValueError, match=text):
        Splits(**options)
    with pytest.raises(ValueError, match=r"give a zeroxla\.Splits"):
        ZeroConfig(splits=options)


def test_pins_of_an_axis_that_the_mesh_lacks_have_no_effect():
    splits = Splits(leaves={"tensor": {"up": 0}}, arrays={"context": {"hidden": None}})
    with pytest.warns(UserWarning, match=r"without effect on the mesh .*arrays={'context'"):
        step_of(splits, tensor=2)


def test_a_step_for_the_same_state_keeps_its_pins():
    splits = Splits(leaves={"tensor": {"up": 0}})
    step = step_of(splits)
    assert step.with_config(ZeroConfig()).config.splits == splits
    arrays = Splits(arrays={"tensor": {"hidden": None}})
    both = step.with_config(ZeroConfig(splits=arrays)).config.splits
    assert (both.leaves, both.arrays) == (splits.leaves, arrays.arrays)
    with pytest.raises(ValueError, match=r"with_config\(splits=Splits\(leaves="):
        step.with_config(ZeroConfig(splits=Splits(leaves={"tensor": {"up": 1}})))
