"""Any optax transformation, unmodified: ten steps equal the unsharded optax run.

The optimizer sees global arrays in natural shapes, so norms over all leaves, means over rows and
columns, and products of whole matrices come out as they would on one device.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import Reference, relative_errors, worst
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla.frontend import adapt

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUM_STEPS = 10


def loss(p, batch, key):
    h = jnp.tanh(batch["x"] @ p["first"]["kernel"] + p["first"]["bias"])
    h = jnp.tanh(h @ p["odd"]) @ p["back"]
    return mse(h * p["scale"], batch["y"]), {"h": h.mean()}


def init(key, batch):
    """Leaves split along their first and second dim, padded, whole, and frozen."""
    shapes = {"kernel": (6, 16), "bias": (16,), "odd": (16, 5), "back": (5, 3), "scale": ()}
    p = leaves(**shapes)(key, batch)
    first = {"kernel": p.pop("kernel"), "bias": p.pop("bias")}
    return {"first": first, **p, "frozen": jnp.ones((4, 4))}


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def labels(params):
    return jax.tree.map(lambda x: "matrices" if x.ndim == 2 else "others", params)


def injected(**options):
    return optax.inject_hyperparams(optax.adamw)(**options)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9),
    "muon": lambda: contrib.muon(0.02),
    "clip_and_masked_decay": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=is_matrix),
    ),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "injected_schedule": lambda: injected(learning_rate=optax.linear_schedule(1e-2, 1e-3, 16)),
    "two_rates": lambda: optax.multi_transform(
        {"matrices": injected(learning_rate=1e-2), "others": optax.sgd(0.1)}, labels
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), 3),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.rmsprop(1e-2, eps=1e-3), 2),
    # The loss comes to them, also inside a chain.
    "plateau": lambda: optax.chain(
        optax.adamw(0.3), contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=2)
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "lbfgs_without_line_search": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}
# One with moments for each leaf that reads the norm of all gradients.
QUICK = ("clip_and_masked_decay",)
MESHES = dict(zip(OPTIMIZERS, itertools.cycle([(2, 4), (3, 2)])))


@pytest.mark.parametrize(
    ("name", "shape"),
    thinned(
        [(name, MESHES[name]) for name in QUICK],
        slow=[(name, mesh) for name, mesh in MESHES.items() if name not in QUICK],
        rows=True,
    ),
)
def test_ten_steps_equal_unsharded_optax(name, shape):
    config = zeroxla.ZeroConfig(persistence_threshold=0, unit_elements=90, frozen="^frozen")
    mesh = zeroxla.make_mesh(nodes=shape[0], devices_per_node=shape[1])
    batch = vectors(2 * mesh.size)
    step = zeroxla.make_step((init, loss), mesh, OPTIMIZERS[name](), config=config)
    state = step.init(jax.random.key(0), batch)

    adapted, optimizer = adapt((init, loss)), OPTIMIZERS[name]()
    reference = Reference(
        init=adapted.init, loss=adapted.loss, world=mesh.size, is_frozen=config.is_frozen
    )
    params, model_state, key = reference.start(jax.random.key(0), batch)
    opt_state, update = optimizer.init(reference.masked(params)), reference.step(optimizer)
    before = jax.tree.map(np.asarray, params)
    for i in range(NUM_STEPS):
        state, metrics = step(state, batch)
        params, opt_state, model_state, _ = update(params, opt_state, model_state, key, i, batch)
    found = zeroxla.full_params(state)
    assert worst(relative_errors(found, params))[1] < 1e-4
    np.testing.assert_array_equal(found["frozen"], before["frozen"])
    moved = relative_errors({**found, "frozen": 0}, {**before, "frozen": 0})
    assert min(e for path, e in moved.items() if path != "frozen") > 1e-3, moved
    # The rate of the step taken, where there is one rate.
    if name == "injected_schedule":
        assert float(metrics["learning_rate"]) == pytest.approx(1e-2 - 9e-3 * (NUM_STEPS - 1) / 16)
    else:
        assert ("learning_rate" in metrics) == (name == "two_rates")


def test_the_optimizer_state_is_split_like_the_leaves():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step((init, loss), mesh, optax.adafactor(0.1, min_dim_size_to_factor=4))
    shapes = step.abstract_state(vectors(16))
    arrays = [x for x in jax.tree.leaves(shapes.opt_state) if x.size >= mesh.size]
    assert arrays
    for array in arrays:
        assert array.sharding.shard_shape(array.shape) != array.shape, array


def test_without_an_optimizer_it_is_adamw():
    mesh = zeroxla.make_mesh(nodes=1)
    model = leaves(w=(6, 3)), lambda p, batch, key: mse(batch["x"] @ p["w"], batch["y"])
    step = zeroxla.make_step(model, mesh)
    state = step.init(jax.random.key(0), vectors(16))
    before = zeroxla.full_params(state)
    _, gradients = step.grad(state, vectors(16))
    state, metrics = step(state, vectors(16))
    assert float(metrics["learning_rate"]) == pytest.approx(3e-4)
    adamw = optax.adamw(3e-4)
    updates, _ = adamw.update(jax.device_get(gradients), adamw.init(before), before)
    expected = optax.apply_updates(before, updates)
    assert worst(relative_errors(zeroxla.full_params(state), expected))[1] < 1e-6
