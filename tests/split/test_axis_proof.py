"""A plan of an axis is proved before it runs: what computes something else in parts stays whole."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.program.trace import trace
from zeroxla.split import plan_proof, products, way_instance, ways
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.plan_proof import PlanProof, is_close
from zeroxla.split.split_axis import SplitAxis
from zeroxla.step.axes.axis_planner import AxisPlanner
from zeroxla.step.axes.split_loss import SplitLoss

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARTS, WIDTH, HIDDEN, ROWS = 4, 32, 512, 512  # Splitting pays.


def init(key, batch):
    del batch
    first, second = jax.random.split(key)
    return {
        "down": jax.random.normal(second, (HIDDEN, WIDTH)) / 8,
        "up": jax.random.normal(first, (WIDTH, HIDDEN)) / 8,
    }


def loss_with(between):
    """Return the loss of a model that does something between two products."""

    def loss(params, batch, key):
        del key
        return jnp.mean((between(batch["x"] @ params["up"]) @ params["down"]) ** 2)

    return loss


def plan_of(between, proof=None, axis="tensor"):
    """Return the plan of a loss, and the texts of the warnings that it took."""
    params = jax.eval_shape(init, jax.random.key(0), None)
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
    program, _ = trace(loss_with(between), params, batch, jax.random.key(0))
    planner = AxisPlanner(name=axis, length=PARTS, costs=AxisCosts(), proof=proof or PlanProof())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = planner.plan(program, (2, 0, 1, 1), None)
    return plan, [str(w.message) for w in caught]


def split_equations(plan):
    return [eq.name for eq, way in plan.steps if way.is_split]


def reversed_rule():
    """Return a wrong rule of `rev`: as if it did something element by element."""
    return products.RULES["tanh"]


def test_what_a_wrong_rule_splits_stays_whole(monkeypatch):
    """Without the proof, the step would read other hidden elements than it should."""
    monkeypatch.setitem(products.RULES, "rev", reversed_rule())
    mesh = zeroxla.make_mesh(nodes=1, tensor=PARTS)
    loss = loss_with(lambda x: jnp.flip(x, 1) * jnp.arange(HIDDEN))
    step = zeroxla.make_step(
        (init, loss), mesh, optax.sgd(0.1), config=ZeroConfig(persistence_threshold=0)
    )
    batch = {"x": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)}
    with pytest.warns(UserWarning, match=r"tensor=4: a small instance of rev of float32\[4,512\]"):
        state = step.init(jax.random.key(0), batch)
    found, gradients = step.grad(state, batch)
    whole = jax.tree.map(np.asarray, zeroxla.full_params(state))
    want, expected = jax.value_and_grad(loss)(whole, batch, None)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for name in whole:
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradients[name], expected[name], atol=1e-5 * size)


def test_all_other_equations_stay_split(monkeypatch):
    monkeypatch.setitem(products.RULES, "rev", reversed_rule())
    proof = PlanProof()
    plan, texts = plan_of(lambda x: jnp.flip(jnp.tanh(x), 1), proof)
    assert len(texts) == 1
    assert "so it is not split in this way" in texts[0]
    assert "rev" not in split_equations(plan)
    assert split_equations(plan).count("dot_general") == 2
    again, texts = plan_of(lambda x: jnp.flip(jnp.tanh(x), 1), proof)
    assert not texts  # the proof remembers what is wrong
    assert split_equations(again) == split_equations(plan)


def test_a_wrong_derivative_is_found(monkeypatch):
    """Each device gets the sum of all devices' cotangents of a maximum instead of its own."""

    def largest(x):
        return x - lax.stop_gradient(x) + jnp.max(x, axis=1, keepdims=True)

    _, texts = plan_of(largest)
    assert not texts
    monkeypatch.setattr(SplitAxis, "gathered", SplitAxis.shared)
    plan, texts = plan_of(largest)
    assert len(texts) == 1
    assert "reduce_max" in texts[0]
    assert "reduce_max" not in split_equations(plan)


def test_an_equation_that_is_not_linear_does_not_run_on_summands(monkeypatch):
    monkeypatch.setattr(ways, "LINEAR", ways.LINEAR | {"integer_pow", "square"})
    _, texts = plan_of(lambda x: (x @ jnp.ones((HIDDEN, HIDDEN))) ** 2)
    assert any("as summands" in text for text in texts)


def test_what_cannot_run_small_is_split_with_a_warning(monkeypatch):
    monkeypatch.setattr(way_instance, "MOST_ELEMENTS", 10)
    plan, texts = plan_of(jnp.tanh)
    assert len(texts) == 1
    assert "so it is split without proof" in texts[0]
    assert split_equations(plan).count("dot_general") == 2


def test_a_plan_beside_another_axis_is_proved_with_its_collectives(monkeypatch):
    """The program of the second axis has collectives of the first."""
    tried = []

    def try_(instances):
        tried.extend(eq.name for x in instances for eq, _ in x.plan.steps if x.others)
        return try_them(instances)

    try_them = plan_proof._try
    monkeypatch.setattr(plan_proof, "_try", try_)

    def loss(params, batch, key):
        del key
        x = batch["x"] @ params["up"]
        return jnp.mean(((x - jnp.mean(x, 1, keepdims=True)) @ params["down"]) ** 2)

    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("context", "tensor"))
    params = jax.eval_shape(init, jax.random.key(0), None)
    batch = {"x": jax.ShapeDtypeStruct((2, ROWS, WIDTH), jnp.float32)}

    def find():
        key = jax.random.key(0)
        axes = [("context", 4), ("tensor", 2)]
        costs = dict.fromkeys(("context", "tensor"), AxisCosts())
        SplitLoss.of(lambda p, s, *rest: loss(p, *rest), axes, params, {}, batch, key, costs=costs)

    jax.eval_shape(jax.shard_map(find, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))
    assert set(tried) == {"all_gather", "reduce_scatter"}


SAME = np.array([1.0, -2.0, np.inf, np.nan])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (SAME, True),
        (SAME * (1 + 1e-5), True),
        ([1.0, -2.01, np.inf, np.nan], False),
        ([1.0, -2.0, -np.inf, np.nan], False),
        ([1.0, -2.0, np.inf, 0.0], False),
        ([np.nan, -2.0, np.inf, np.nan], False),
    ],
)
def test_arrays_are_compared_up_to_rounding(parts, expected):
    whole = SAME.astype(np.float32)
    each = np.stack([whole, np.asarray(parts, np.float32)])
    assert is_close(whole, each) is expected
    assert not is_close(whole, each[:, :3])


def test_short_dtypes_may_differ_by_their_rounding():
    whole = jnp.ones(4, jnp.bfloat16)
    assert is_close(whole, jnp.stack([whole * 1.02]))
    assert not is_close(whole, jnp.stack([whole * 1.2]))
    assert not is_close(whole, jnp.stack([whole]).astype(jnp.float32))
    assert is_close(jnp.arange(4), jnp.stack([jnp.arange(4)]))
    assert not is_close(jnp.arange(4), jnp.stack([jnp.arange(4) + 1]))
