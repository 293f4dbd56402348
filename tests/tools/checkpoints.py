"""A small model of every kind of leaf, steps on several meshes, and their checkpoints."""

import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroxla
from zeroxla import Checkpointer
from zeroxla.checkpoint.checksums import sum_rest

KEY = jax.random.key(3)
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1), (3, 2)]
ROWS = 48  # over 8 or 6 devices, 2 micro-batches of each: an even number of rows
OPTIONS = {"persistence_threshold": 30, "unit_elements": 200, "frozen": ("frozen",)}


class Net(nn.Module):
    """A model with leaves that are padded, small enough to stay whole, frozen and empty, and with
    batch statistics."""

    empty: bool = True

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(13)(x)  # 13 is no multiple of any mesh
        x = nn.BatchNorm(use_running_average=not train, use_fast_variance=False)(x)
        frozen = self.param("frozen", nn.initializers.normal(), (13, 11))
        out = nn.Dense(3)(jnp.tanh(x) @ frozen)
        if self.empty:
            out += self.param("empty", nn.initializers.normal(), (0, 3)).sum()
        return out

    def loss(self, batch, *, train):
        return jnp.mean((self(batch["x"], train) - batch["y"]) ** 2)


def batch_of(i):
    """Return a batch that repeats two rows, so that every device of any mesh has the same batch
    statistics."""
    generator = np.random.default_rng(i)
    pair = {"x": generator.normal(size=(2, 7)), "y": generator.normal(size=(2, 3))}
    return {name: np.tile(x.astype(np.float32), (ROWS // 2, 1)) for name, x in pair.items()}


NET = Net()


def step_on(shape, optimizer=None, *, model=NET, **options):
    nodes, devices = shape
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    config = zeroxla.ZeroConfig(**{**OPTIONS, **options})
    return zeroxla.make_step(model, mesh, optimizer or optax.adam(1e-2), config=config)


def run(step, state, first, count):
    """Take steps; return the state and the losses."""
    losses = []
    for i in range(first, first + count):
        state, metrics = step(state, batch_of(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def logical(state):
    """Return the state's arrays in natural shapes, on this host."""
    params, opt_state = (
        jax.tree.unflatten(
            jax.tree.structure(tree), [p.natural(x) for p, x in zip(places, jax.tree.leaves(tree))]
        )
        for tree, places in zip((state.params, state.opt_state), state.placements)
    )
    rest = (state.model_state, state.step, state.loss_scale, jax.random.key_data(state.key))
    return jax.tree.map(np.asarray, (params, opt_state, rest))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


class Steps(dict):
    """Steps by the shape of their mesh, with the shapes of a batch: made when asked for."""

    def __missing__(self, shape):
        self[shape] = step_on(shape)
        self[shape].abstract_state(batch_of(0))
        return self[shape]


@pytest.fixture(scope="module")
def steps():
    return Steps()


class Saved(dict):
    """For each mesh, the folder of a checkpoint after 3 steps, the state then, and the next 5
    losses: made when asked for."""

    def __init__(self, steps, new_folder):
        super().__init__()
        self.steps, self.new_folder = steps, new_folder

    def __missing__(self, shape):
        step, folder = self.steps[shape], self.new_folder("saved")
        state, _ = run(step, step.init(KEY, batch_of(0)), 0, 3)
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.save(3, state, {"next": 3})
            kept = logical(state)
            # The checkpoint is written while these steps replace the state.
            _, losses = run(step, state, 3, 5)
        self[shape] = folder, kept, losses
        return self[shape]


@pytest.fixture(scope="module")
def saved(steps, tmp_path_factory):
    """Checkpoints by mesh."""
    return Saved(steps, tmp_path_factory.mktemp)


def copy_of(folder, to):
    return shutil.copytree(folder, to / "copy")


def resum(folder):
    """Write the checksums anew, as if the files had been saved as they are now."""
    (folder / "checksums.rest.json").unlink()
    sum_rest(folder)
