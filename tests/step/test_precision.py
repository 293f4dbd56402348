"""bfloat16 and float16 computation, the loss scale, and the dtype in which gradients travel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import Reference, remember_gradients
from tools.zoo import CASES
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla import LossScale
from zeroxla.frontend import adapt

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Relative spacing of the numbers of each dtype.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
SCALE = 1024.0


def first_gradients(name, **options):
    """(state before, loss, gradients) of a case of the zoo on (2, 4), and the step."""
    case = CASES[name]
    config = zeroxla.ZeroConfig(
        persistence_threshold=0,
        unit_elements=case.unit_elements,
        init_loss_scale=SCALE,
        **options,
    )
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(case.make(), mesh, optax.sgd(0.1), loss=case.loss, config=config)
    batch = case.batch(8 * case.rows)
    state = step.init(jax.random.key(0), batch)
    return step, state, batch, *step.grad(state, batch)


def expected_gradients(name, state, batch, dtype):
    case = CASES[name]
    adapted = adapt(case.reference_model(), case.loss)
    reference = Reference(
        init=adapted.init, loss=adapted.loss, world=8, dtype=jnp.dtype(dtype), scale=SCALE
    )
    loss, _, gradients, _ = jax.jit(reference.gradients)(
        zeroxla.full_params(state), state.model_state, state.key, 0, batch
    )
    return loss, gradients


def all_relative(found, expected):
    """|found - expected| / |expected| over all leaves together."""
    both = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    difference, size = 0.0, 0.0
    for a, b in both:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        difference, size = difference + np.sum((a - b) ** 2), size + np.sum(b**2)
    return float(np.sqrt(difference / size))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gpt_scan", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt_scan", "float16", marks=pytest.mark.slow),
        pytest.param("batchnorm", "float16", marks=(pytest.mark.slow, pytest.mark.smoke)),
        pytest.param("llama_unrolled", "bfloat16", marks=pytest.mark.slow),
        pytest.param("odd_dims", "float16", marks=pytest.mark.smoke),
    ],
)
def test_16_bit_gradients_equal_the_reference_in_that_dtype(name, dtype):
    """Both compute in the dtype and sum over devices in float32. Where XLA fuses another way, an
    intermediate is rounded or not: a few spacings of the dtype, averaged over many elements, so
    one spacing bounds a leaf. To float32 the distance is that of the dtype, no more than the
    reference's own."""
    _, state, batch, loss, found = first_gradients(name, compute_dtype=dtype)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(found))
    want_loss, expected = expected_gradients(name, state, batch, dtype)
    _, exact = expected_gradients(name, state, batch, "float32")
    assert abs(float(loss) / float(want_loss) - 1) < EPS[dtype]
    assert all_relative(found, expected) < EPS[dtype]
    assert all_relative(found, exact) < 1.25 * all_relative(expected, exact)


@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned(
        [("odd_dims", "bfloat16")],
        slow=[("gpt_scan", "bfloat16"), ("gpt_scan", "float16")],
        rows=True,
    ),
)
def test_16_bits_travel_and_masters_are_float32(name, dtype):
    case = CASES[name]
    config = zeroxla.ZeroConfig(
        persistence_threshold=0, compute_dtype=dtype, reduce_dtype=dtype, unit_elements=1000
    )
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(case.make(), mesh, optax.adamw(1e-3), config=config)
    state = step.abstract_state(case.batch(16))
    floats = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.dtype != jnp.int32]
    assert {x.dtype.name for x in floats} == {"float32"}
    text = step.lower(state, case.batch(16)).as_text()
    for operation in ("all_gather", "all_to_all"):
        kinds = set(re.findall(rf"stablehlo.{operation}.*-> tensor<[0-9x]*x(\w+)>", text))
        assert kinds == {"ui16"}, (operation, kinds)
    assert "reduce_scatter" not in text


@pytest.mark.slow
def test_a_bfloat16_reduce_rounds_gradients_and_nothing_else():
    """Each addend is rounded once a hop: relative error at most half a spacing, twice."""
    _, state, batch, loss, found = first_gradients("gpt_scan", reduce_dtype="bfloat16")
    want_loss, exact = expected_gradients("gpt_scan", state, batch, "float32")
    assert float(loss) == pytest.approx(float(want_loss), rel=5e-6)
    error = all_relative(found, exact)
    assert 1e-4 < error < EPS["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", thinned(["float16"], slow=["bfloat16"]))
def test_a_loop_whose_body_returns_constants_runs_in_16_bit(dtype):
    def loss(p, batch, key):
        def turn(carry, w):
            x, one = carry
            return (jnp.tanh(x @ w) * one, jnp.ones_like(one)), 1.0

        (x, _), ones = jax.lax.scan(turn, (batch["x"], p["one"]), p["w"])
        return mse(x @ p["last"], batch["y"]) + ones.sum()

    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    config = zeroxla.ZeroConfig(persistence_threshold=0, compute_dtype=dtype, init_loss_scale=8.0)
    model = leaves(w=(3, 6, 6), one=(6,), last=(6, 3)), loss
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)
    _, metrics = step(step.init(jax.random.key(0), vectors(16)), vectors(16))
    assert bool(metrics["finite"])
    assert float(metrics["grad_norm"]) > 0


def overflowing(params, batch, key):
    """A loss whose gradient is 4 x: float16 holds 65504, so a scale of 2^14 or more overflows."""
    return jnp.sum(params["w"] * batch["x"].mean(0)) * jnp.float16(4), {"w": params["w"][0]}


@pytest.fixture(scope="module")
def overflow_step():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    config = zeroxla.ZeroConfig(
        persistence_threshold=0, compute_dtype="float16", loss_scale_window=2
    )
    optimizer = optax.chain(remember_gradients(), optax.adam(0.1))
    model = (lambda key, batch: {"w": jnp.ones(24)}, overflowing)
    return zeroxla.make_step(model, mesh, optimizer, config=config)


def test_an_overflow_skips_the_step_and_halves_the_scale(overflow_step):
    batch = {"x": np.ones((16, 24), np.float32)}
    state = overflow_step.init(jax.random.key(0), batch)
    assert float(state.loss_scale.scale) == 2.0**15
    before = jax.device_get((state.params, state.opt_state, jax.random.key_data(state.key)))
    for skipped in (1, 2):
        state, metrics = overflow_step(state, batch)
        assert not bool(metrics["finite"])
        assert int(metrics["skipped"]) == skipped
        assert float(metrics["loss_scale"]) == 2.0 ** (16 - skipped)
        after = jax.device_get((state.params, state.opt_state, jax.random.key_data(state.key)))
        jax.tree.map(np.testing.assert_array_equal, after, before)
        assert int(state.step) == skipped
        assert float(metrics["loss"]) == 4 * 24  # The loss itself was finite.
    # 2^13 fits. After two finite steps the scale doubles, and overflows again.
    scales = []
    for _ in range(4):
        state, metrics = overflow_step(state, batch)
        scales.append((float(metrics["loss_scale"]), bool(metrics["finite"])))
    assert scales == [(2.0**13, True), (2.0**13, True), (2.0**14, False), (2.0**13, True)]
    assert int(metrics["skipped"]) == 3
    assert int(state.step) == 6
    # The gradient is unscaled: 4, not 4 x 2^13.
    np.testing.assert_array_equal(state.opt_state[0]["w"], np.full(24, 4.0))


def test_loss_scale_rules():
    scale = LossScale.create(4.0)

    def after(scale, *finite, window=3):
        for flag in finite:
            scale = scale.after(jnp.asarray(flag), window=window)
        return float(scale.scale), int(scale.good_steps), int(scale.skipped)

    assert after(scale, True, True) == (4.0, 2, 0)
    assert after(scale, True, True, True) == (8.0, 0, 0)
    assert after(scale, True, True, False, True) == (2.0, 1, 1)
    assert after(scale, *[False] * 40) == (2.0**-14, 0, 40)
    assert after(scale, *[True] * 120) == (2.0**24, 0, 0)
    assert after(LossScale.create(None), False, True, window=None) == (1.0, -1, 1)
