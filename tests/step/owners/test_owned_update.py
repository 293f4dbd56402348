"""An update with owners gives what optax gives on one device, and sends each matrix once there and
once back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tools.matrix_optimizers import damped, shampoo, soap
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.mesh.placement import place
from zeroxla.program.hlo.text import parse
from zeroxla.step.owners import owners_turn
from zeroxla.step.owners.owned_update import OwnedUpdate
from zeroxla.step.state import natural, stored
from zeroxla.step.update import OptimizerUpdate
from zeroxla.wire.leaves import make_layout, place_opt_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = {
    **{f"wide_{i}": (16, 24) for i in range(11)},  # one for each of 8 owners, and 3 besides
    "tall": (40, 8),
    "padded": (13, 9),
    "stack": (3, 16, 8),
    "deep": (10, 8, 6),  # layers: one for each owner, and 2 besides
    "bias": (16,),
    "scale": (),
}
STACKED = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
MATRIX = contrib.MuonDimensionNumbers()


def numbers(params):
    """Muon's dims: layers of a stack are matrices of their own."""
    found = {2: MATRIX, 3: STACKED}
    return jax.tree.map(lambda x: found.get(x.ndim), params)


def muon(rate=0.02, **options):
    return contrib.muon(rate, muon_weight_dimension_numbers=numbers, **options)


def labels(params):
    return {name: "tall" if name == "tall" else "rest" for name in params}


OPTIMIZERS = {
    "muon": muon,
    "muon, a schedule and clipping": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        muon(optax.linear_schedule(0.05, 0.01, 4), weight_decay=0.1),
    ),
    "muon, injected": lambda: optax.inject_hyperparams(lambda rate: muon(rate))(rate=0.02),
    "muon, adaptive": lambda: muon(adaptive=True, preconditioning="aol"),
    "muon, spectral": lambda: muon(preconditioning="spectral"),
    "muon, bfloat16 momentum": lambda: muon(mu_dtype=jnp.bfloat16),
    "muon, twice": lambda: optax.chain(
        muon(-1.0), optax.clip_by_global_norm(1.0), muon(0.1, nesterov=False)
    ),
    "several": lambda: optax.multi_transform(
        {"tall": shampoo(0.1), "rest": optax.chain(damped(), optax.adam(1e-2))}, labels
    ),
    "shampoo": lambda: shampoo(0.1),
    "soap": lambda: soap(0.1),
    "damped": lambda: optax.chain(damped(), optax.sgd(0.1, momentum=0.9)),
}
ELSEWHERE = ("muon, a schedule and clipping", "shampoo", "several")
"""The optimizers that the slow tests take on other meshes too."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """An optimizer's update of leaves that are stored as a step stores them."""

    update: OwnedUpdate
    params: dict
    opt_state: object

    @staticmethod
    def of(optimizer, mesh, shapes=SHAPES, *, is_on=True):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        params = {
            name: jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, sorted(shapes.items()))
        }
        in_params = tuple(
            place(x.shape, mesh.size, skip=(0,) if x.ndim == 3 else ())
            for x in jax.tree.leaves(params)
        )
        opt_state = optimizer.init(params)
        in_opt = place_opt_state(opt_state, params, in_params, mesh)
        layout = make_layout(params, in_params, ZeroConfig(persistence_threshold=0))
        placements = in_params, in_opt
        update = OptimizerUpdate(optimizer=optimizer, layout=layout, placements=placements)
        owned = OwnedUpdate(update=update, placements=placements, mesh=mesh, is_on=is_on)
        return Stored(owned, params, opt_state)

    def split(self, tree, placements):
        leaves, structure = jax.tree.flatten(stored(tree, placements))
        shardings = [p.sharding(self.update.mesh) for p in placements]
        return structure.unflatten(map(jax.device_put, leaves, shardings))

    def state(self):
        in_params, in_opt = self.update.placements
        return self.split(self.params, in_params), self.split(self.opt_state, in_opt)

    @functools.cached_property
    def program(self):
        in_params, in_opt = self.update.placements
        shardings = [[p.sharding(self.update.mesh) for p in x] for x in (in_params, in_opt)]

        def update(params, opt_state, grads):
            new = self.update(params, opt_state, grads, jnp.bool_(True), jnp.float32(1.0))
            pairs = zip(new[:2], shardings, strict=True)
            return [
                jax.tree.unflatten(jax.tree.structure(x), list(map(put, jax.tree.leaves(x), s)))
                for x, s in pairs
            ]

        return jax.jit(update)


def put(x, sharding):
    return jax.lax.with_sharding_constraint(x, sharding)


def gradients(params, step):
    keys = jax.random.split(jax.random.key(step + 1), len(params))
    return {name: jax.random.normal(k, x.shape) for k, (name, x) in zip(keys, params.items())}


def taken(made, num_steps=3):
    """Return natural parameters and optimizer state after steps with random gradients."""
    in_params, in_opt = made.update.placements
    params, opt_state = made.state()
    for i in range(num_steps):
        grads = made.split(gradients(made.params, i), in_params)
        params, opt_state = made.program(params, opt_state, grads)
    return jax.device_get((natural(params, in_params), natural(opt_state, in_opt)))


def on_one_device(optimizer, params, num_steps=3):
    @jax.jit
    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    for i in range(num_steps):
        params, opt_state = update(params, opt_state, gradients(params, i))
    return jax.device_get((params, opt_state))


def assert_equal(found, expected, error=2e-5):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(1e-3, float(np.abs(y).max(initial=0)))
        np.testing.assert_allclose(x, y, atol=error * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("name", "nodes", "devices"),
    thinned(
        [],
        slow=[
            *((name, 2, 4) for name in OPTIMIZERS),
            *((name, *mesh) for name in ELSEWHERE for mesh in ((3, 2), (8, 1), (1, 2))),
        ],
        rows=True,
    ),
)
def test_an_update_with_owners_equals_optax_on_one_device(name, nodes, devices):
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    optimizer = OPTIMIZERS[name]()
    made = Stored.of(optimizer, mesh)
    shapes = jax.eval_shape(lambda: (*made.state(), made.params))
    scalars = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
    assert made.update.plan(*shapes, *scalars)[2] is not None
    error = 2e-2 if "bfloat16" in name else 2e-5
    assert_equal(taken(made), on_one_device(optimizer, made.params), error)


@pytest.mark.slow
def test_matrices_are_computed_together_up_to_a_number_of_elements(monkeypatch):
    """Two at a time of five: the last one is alone."""
    monkeypatch.setattr(owners_turn, "BATCH_ELEMENTS", 2 * 16 * 24)
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    made = Stored.of(muon(), mesh, {f"wide_{i}": (16, 24) for i in range(10)})
    assert_equal(taken(made), on_one_device(muon(), made.params))


def lowered(made):
    params, opt_state = made.state()
    grads = made.split(made.params, made.update.placements[0])
    return made.program.lower(params, opt_state, grads).compile()


def kinds(compiled):
    module = parse(compiled.as_text())
    names = [x.opcode for scope in module.computations.values() for x in scope.values()]
    return {k: names.count(k) for k in ("all-to-all", "all-gather", "all-reduce") if k in names}


def test_a_matrix_travels_once_there_and_once_back(mesh24):
    shapes = {**SHAPES, "padded": (13, 16)}
    owned = kinds(lowered(Stored.of(muon(), mesh24, shapes)))
    assert owned == {"all-to-all": 2}


@pytest.mark.slow
def test_xla_gathers_each_matrix_without_owners(mesh24):
    shapes = {**SHAPES, "padded": (13, 16)}
    by_xla = kinds(lowered(Stored.of(muon(), mesh24, shapes, is_on=False)))
    assert by_xla["all-gather"] > 10


@pytest.mark.slow
def test_updates_without_matrices_stay_as_they_are(mesh24):
    """The same program with owners and without."""
    for optimizer in (optax.adam(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)):
        made = [Stored.of(optimizer, mesh24, is_on=is_on) for is_on in (True, False)]
        args = made[0].state(), made[0].split(made[0].params, made[0].update.placements[0])
        texts = [x.program.lower(*args[0], args[1]).as_text() for x in made]
        assert texts[0] == texts[1]
