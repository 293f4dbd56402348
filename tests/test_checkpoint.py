"""Checkpoints: bit-exact on any mesh, whole or not there, and clear about what does not fit."""

import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax import contrib
from quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1), (3, 2)]
ROWS = 24  # divides over all of them
OPTIONS = {"persistence_threshold": 30, "unit_elements": 200, "frozen": ("frozen",)}


class Net(nn.Module):
    """Leaves that are padded, small enough to stay whole, frozen, empty; batch statistics."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(13)(x)  # 13 is no multiple of any mesh
        x = nn.BatchNorm(use_running_average=not train, use_fast_variance=False)(x)
        frozen = self.param("frozen", nn.initializers.normal(), (13, 11))
        empty = self.param("empty", nn.initializers.normal(), (0, 3))
        return nn.Dense(3)(jnp.tanh(x) @ frozen) + empty.sum()

    def loss(self, batch, *, train):
        return jnp.mean((self(batch["x"], train) - batch["y"]) ** 2)


def batch_of(i):
    generator = np.random.default_rng(i)
    return {
        "x": generator.normal(size=(ROWS, 7)).astype(np.float32),
        "y": generator.normal(size=(ROWS, 3)).astype(np.float32),
    }


def step_on(shape, optimizer=None, **options):
    nodes, devices = shape
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    config = zeroxla.ZeroConfig(**{**OPTIONS, **options})
    return zeroxla.make_step(Net(), mesh, optimizer or optax.adam(1e-2), config=config)


def run(step, state, first, count):
    """Take steps; return the state and the losses."""
    losses = []
    for i in range(first, first + count):
        state, metrics = step(state, batch_of(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def logical(state):
    """The state's arrays in natural shapes, on this host."""
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


@pytest.fixture(scope="module")
def steps():
    made = {shape: step_on(shape) for shape in MESHES}
    for step in made.values():
        step.abstract_state(batch_of(0))
    return made


@pytest.fixture(scope="module")
def saved(steps, tmp_path_factory):
    """By mesh: the folder of a checkpoint of 3 steps, the state then, and the next 5 losses."""
    made = {}
    for shape, step in steps.items():
        folder = tmp_path_factory.mktemp("saved")
        state, _ = run(step, step.init(KEY, batch_of(0)), 0, 3)
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.save(3, state, {"next": 3})
            kept = logical(state)
            # Written while the steps go on, that take the state's place.
            _, losses = run(step, state, 3, 5)
        made[shape] = folder, kept, losses
    return made


@pytest.mark.parametrize("to", MESHES)
@pytest.mark.parametrize("source", MESHES)
def test_a_state_opens_on_any_mesh(steps, saved, source, to):
    folder, kept, losses = saved[source]
    with Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(steps[to])
    assert (restored.number, restored.position) == (3, {"next": 3})
    assert_same(logical(restored.state), kept)
    shapes = steps[to].shapes()
    for x, y in zip(jax.tree.leaves(restored.state), jax.tree.leaves(shapes), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    _, found = run(steps[to], restored.state, 3, 5)
    if source == to:
        assert found == losses
    else:
        np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_orbax_alone_reads_it(saved):
    folder, (params, *_), _ = saved[2, 4]
    found = ocp.StandardCheckpointer().restore(folder / "3" / "state")
    assert_same(found["params"]["Dense_0"], params["Dense_0"])


# what is in it


def test_what_is_inside_is_said_without_reading_it(saved):
    folder, (params, *_), _ = saved[3, 2]
    with Checkpointer(folder) as checkpointer:
        about = checkpointer.describe()
    assert (about.number, about.position, about.mesh) == (3, {"next": 3}, {"node": 3, "device": 2})
    leaf = about.leaves["params", "Dense_0", "kernel"]
    assert (leaf.shape, leaf.dtype) == (params["Dense_0"]["kernel"].shape, "float32")
    assert "params/Dense_0/kernel" in str(about)
    assert "7 x 13" in str(about)


def test_equal_models_have_equal_fingerprints(saved):
    prints = set()
    for folder, *_ in saved.values():
        with Checkpointer(folder) as checkpointer:
            prints.add(checkpointer.describe().fingerprint)
    assert len(prints) == 1


def test_parameters_only(steps, saved):
    folder, (params, *_), _ = saved[2, 4]
    with Checkpointer(folder) as checkpointer:
        found = checkpointer.restore_params()
        some = checkpointer.restore_params(pattern="Dense_0/")
        fresh = steps[4, 2].init(jax.random.key(9), batch_of(0))
        before = logical(fresh)
        state = checkpointer.restore_params(fresh, "Dense_1/kernel")
        with pytest.raises(ValueError, match=r"no parameter .* matches 'Dense_7'; .*Dense_0/bias"):
            checkpointer.restore_params(pattern="Dense_7")
    del found["empty"]  # of no elements: nothing is stored
    assert_same(found, {name: x for name, x in params.items() if name != "empty"})
    assert_same(some, {"Dense_0": params["Dense_0"]})
    after = logical(state)
    np.testing.assert_array_equal(after[0]["Dense_1"]["kernel"], params["Dense_1"]["kernel"])
    after[0]["Dense_1"]["kernel"] = before[0]["Dense_1"]["kernel"]
    assert_same(after, before)


# what does not fit


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.sgd(0.1), r"another optimizer: its opt_state/0/count is int32\[\], .* it is missing"),
        (optax.adam(0.1, mu_dtype="bfloat16"), r"opt_state/0/mu/.* float32\[.*is bfloat16\["),
    ],
)
def test_another_optimizer_is_refused_by_name(saved, optimizer, message):
    step = step_on((2, 4), optimizer)
    with Checkpointer(saved[2, 4][0]) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.restore(step.abstract_state(batch_of(0)))


def test_another_model_is_refused_by_name(saved):
    step = step_on((2, 4))
    wider = {"x": np.zeros((ROWS, 9), np.float32), "y": batch_of(0)["y"]}
    shapes = step.abstract_state(wider)
    message = r"another model: its params/Dense_0/kernel is float32\[7,13\], .* float32\[9,13\]"
    with Checkpointer(saved[2, 4][0]) as checkpointer:
        # The optimizer's copies differ too, and come first; the model is what is wrong.
        with pytest.raises(ValueError, match=message):
            checkpointer.restore(shapes)
        with pytest.raises(ValueError, match=message):
            checkpointer.restore_params(step.init(KEY, wider), "kernel")


def test_a_step_that_has_seen_no_batch(saved):
    with Checkpointer(saved[2, 4][0]) as checkpointer:
        with pytest.raises(ValueError, match="the step has seen no batch"):
            checkpointer.restore(step_on((2, 4)))


def test_an_empty_folder_and_a_number_that_is_not_there(steps, saved, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            checkpointer.restore(steps[2, 4])
    with Checkpointer(saved[2, 4][0]) as checkpointer:
        with pytest.raises(ValueError, match=r"no complete checkpoint of step 4 \(3\)"):
            checkpointer.restore(steps[2, 4], 4)


def test_a_newer_format(steps, saved, tmp_path):
    folder = copy_of(saved[2, 4][0], tmp_path)
    about = folder / "3" / "state" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "format": 99}))
    resum(folder / "3" / "state")
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(ValueError, match=r"is of format 99, .* install a newer zeroxla"):
            checkpointer.restore(steps[2, 4])


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}])
def test_numbers_below_one(tmp_path, options):
    with pytest.raises(ValueError, match="give 1 or more"):
        Checkpointer(tmp_path, **options)


def test_names_that_a_checkpoint_cannot_tell_apart(tmp_path):
    def init(key, batch):
        return {"a": {"b": jnp.ones(4)}, "a.b": jnp.ones(4)}

    def loss(params, batch, key):
        return (params["a"]["b"] * params["a.b"] * batch["x"]).sum()

    step = zeroxla.make_step((init, loss), zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    state = step.init(KEY, {"x": np.ones((8, 4))})
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"params/a/b and params/a\.b have the same name"):
            checkpointer.save(1, state)


# damage


def copy_of(folder, to):
    import shutil

    return shutil.copytree(folder, to / "copy")


def resum(folder):
    """Sum the files anew, as if they had been written so."""
    from zeroxla.checkpoint.sums import sum_rest

    (folder / "checksums.rest.json").unlink()
    sum_rest(folder)


def data_file(folder):
    files = [f for f in (folder / "ocdbt.process_0").rglob("*") if f.is_file()]
    return max(files, key=lambda f: f.stat().st_size)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def lose(file):
    file.unlink()


@pytest.fixture
def two(steps, tmp_path):
    """A folder with checkpoints of 1 and 2 steps, and the state after 1."""
    step = steps[2, 4]
    state, _ = run(step, step.init(KEY, batch_of(0)), 0, 1)
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, state)
        kept = logical(state)
        state, _ = run(step, state, 1, 1)
        checkpointer.save(2, state)
    return tmp_path, kept


@pytest.mark.parametrize("damage", [flip, cut, lose])
@pytest.mark.parametrize("which", ["data", "about.json", "checksums.rest.json"])
def test_a_damaged_checkpoint_is_passed_over_and_its_file_named(steps, two, which, damage):
    folder, kept = two
    state = folder / "2" / "state"
    file = data_file(state) if which == "data" else state / which
    damage(file)
    said = []
    with Checkpointer(folder, report=said.append) as checkpointer:
        restored = checkpointer.restore(steps[2, 4])
        assert checkpointer.latest() == restored.number == 1
        with pytest.raises(ValueError, match=f"step 2 is damaged: .*{file.name}.* another one: 1"):
            checkpointer.restore(steps[2, 4], 2)
        # Reached again, it takes the damaged one's place.
        state, _ = run(steps[2, 4], restored.state, 1, 1)
        assert checkpointer.save(2, state)
    assert_same(logical(checkpointer.restore(steps[2, 4], 1).state), kept)
    assert len(said) == 2
    assert file.name in said[0]
    with Checkpointer(folder, report=said.append) as checkpointer:
        assert checkpointer.latest() == 2


def test_all_damaged(steps, two):
    folder, _ = two
    for number in ("1", "2"):
        cut(data_file(folder / number / "state"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.latest() is None
            with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
                checkpointer.restore(steps[2, 4])


# when it is saved


def test_every_and_keep(steps, tmp_path):
    step = steps[2, 4]
    state = step.init(KEY, batch_of(0))
    with Checkpointer(tmp_path, keep=2, every=2) as checkpointer:
        saved = [checkpointer.save(i, state) for i in range(1, 7)]
        assert saved == [False, True] * 3
        assert checkpointer.save(7, state, force=True)
        assert not checkpointer.save(7, state, force=True)
        checkpointer.wait()
        assert checkpointer.numbers() == [6, 7]


# states of other optimizers, and what wires remember


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.adafactor(0.01, min_dim_size_to_factor=4, momentum=0.9),
        lambda: contrib.muon(0.02),
    ],
    ids=["adafactor", "muon"],
)
def test_other_optimizers_change_the_mesh_and_accumulate(optimizer, tmp_path):
    one, other = step_on((2, 4), optimizer()), step_on((3, 2), optimizer(), accumulate=2)
    state, _ = run(one, one.init(KEY, batch_of(0)), 0, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        other.abstract_state(batch_of(0))
        restored = checkpointer.restore(other).state
    assert_same(logical(restored), logical(state))
    _, losses = run(one, state, 2, 3)
    _, found = run(other, restored, 2, 3)
    np.testing.assert_allclose(found, losses, rtol=2e-3)  # batch statistics are of half the rows
