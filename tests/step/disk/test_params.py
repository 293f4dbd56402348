"""Training with parameters on disk gives the same numbers, and no memory ever holds the model."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.disk import flip, on_disk, state_file
from tools.offload import SMALL, assert_same, batch, make, make_step, taken, trained
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Checkpointer, Offload, ZeroConfig, models
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.mesh.processes.same_program import ProgramCalls
from zeroxla.offload.array_bytes import array_bytes_per_device, shard_bytes
from zeroxla.offload.disk import read_ahead
from zeroxla.offload.disk.disk_array import DiskShape
from zeroxla.offload.disk.state_file import DamagedStateError
from zeroxla.offload.memory_kinds import place_of
from zeroxla.step.disk.writer import DiskWriter

pytestmark = pytest.mark.usefixtures("quick_compilation")


def disk(tmp_path, **options):
    options = {"optimizer": "disk", "sub_group": 100_000, **options}
    return Offload(params="disk", path=tmp_path / "state", **options)


@pytest.fixture(scope="module")
def stepped(mesh24, tmp_path_factory):
    """A step whose state is all on disk, and its state after three steps."""
    place = disk(tmp_path_factory.mktemp("stepped"), sub_group=20_000)
    step, state = make(mesh24, place)
    return step, taken(step, state, 3)[0]


def test_the_model_is_in_no_memory(mesh24, stepped):
    step, state = stepped
    whole = make_step(mesh24, Offload()).abstract_state(batch())
    mine = shard_bytes(whole.params)
    shapes = step.shapes()
    assert shard_bytes(shapes.params, place="disk") > 0.99 * mine
    assert max(array_bytes_per_device(state).values()) < 0.02 * mine
    # What the gradients' program is given stands for leaves, and is none.
    memory = zeroxla.inspect.memory(step.lower(shapes, batch()).compile())
    assert memory.argument_bytes < 0.02 * mine


@pytest.mark.slow
def test_the_state_is_born_a_few_leaves_at_a_time(mesh24, tmp_path, monkeypatch):
    """The same leaves as without; no program of `init` returns more than a sub-group of them."""
    step = make_step(mesh24, disk(tmp_path, sub_group=2500), model="unrolled")
    made, run = {}, ProgramCalls.__call__

    def call(self, name, program, *args):
        found = run(self, name, program, *args)
        made[name] = max(array_bytes_per_device(found).values())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ProgramCalls, "__call__", call)
        state = step.init(jax.random.key(0), batch())
    largest = max(x.nbytes for x in on_disk(state.params)) // 8
    assert len(made) > 10
    assert max(made.values()) <= max(4 * 2500, largest)
    params = make(mesh24, Offload(), model="unrolled")[1].params
    assert shard_bytes(params) > 4 * max(made.values())
    assert_same(state.params, params)


def test_a_step_reads_parameters_for_forward_for_backward_and_for_the_update(stepped):
    step, state = stepped
    file = state_file(state)
    state, _ = step(state, batch())
    read = Counter(x.nbytes for x in file.blocks.accesses if x.kind == "read")
    asked = step.programs.desk.orders["gradients"]
    fetched = sum(file.nbytes_of(name) for names in asked.values() for name in names)
    held = sum(x.nbytes for x in on_disk(state.params))
    assert 1.9 * held < fetched < 2.1 * held  # small leaves once, one of two uses three times
    moments = sum(x.nbytes for x in on_disk(state.opt_state))
    needed = fetched + held + moments
    parts = sum(map(len, asked.values())) + len(file.names)
    assert needed <= sum(n * k for n, k in read.items()) <= needed + 4096 * parts
    # A loop's turn reads its layer, forward and then backward in the other order.
    kernel = [name for name in asked[0] if name.startswith("params/h/mlp/c_fc/kernel")]
    assert [name[-2:] for name in kernel] == ["#0", "#1", "#1", "#0"]
    assert file.nbytes_of(kernel[0]) == 64 * 256 * 4 // 8


@pytest.mark.slow
def test_what_the_last_step_asked_for_is_read_ahead(mesh24, tmp_path, monkeypatch):
    """And no more than there is room for; a wrong guess changes nothing."""
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 8 * 40_000)
    step, state = make(mesh24, disk(tmp_path))
    want = taken(make_step(mesh24, Offload()), make(mesh24, Offload())[1], 4)[1]
    begun = []
    real = read_ahead.ReadAhead.take

    def take(self, device, names):
        begun.append(self.bytes_ahead(device))
        found = real(self, device, names)
        begun.append(self.bytes_ahead(device))
        return found

    monkeypatch.setattr(read_ahead.ReadAhead, "take", take)
    state, losses = taken(step, state, 2)
    assert 20_000 < max(begun) <= 40_000
    orders = step.programs.desk.orders
    orders["gradients"] = {d: names[::-1] for d, names in orders["gradients"].items()}
    state, more = taken(step, state, 1)
    orders["gradients"] = {0: ["params/ln_f/scale[0:8]"] * 3}
    state, last = taken(step, state, 1)
    assert [*losses, *more, *last] == want


@pytest.mark.slow
def test_a_checkpoint_opens_in_every_memory(mesh24, tmp_path):
    place = disk(tmp_path)
    step, state = make(mesh24, place)
    state, _ = taken(step, state, 2)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(2, state)
        state, want = taken(step, state, 2)
        want = want, jax.tree.map(np.asarray, trained(state))
        for other in (place, Offload(), Offload(params="host", optimizer="host")):
            again = make_step(mesh24, other)
            again.abstract_state(batch())
            restored = checkpointer.restore(again).state
            assert bool(on_disk(restored.params)) == (other is place)
            found, losses = taken(again, restored, 2)
            assert losses == want[0]
            assert_same(trained(found), want[1])
            state = found if other is place else state
        # Some of the parameters of an earlier step, into the file.
        kernels = checkpointer.restore_params(pattern="kernel")
        mixed = checkpointer.restore_params(state, "kernel")
        assert_same(
            mixed.params["h"]["mlp"]["c_fc"]["kernel"], kernels["h"]["mlp"]["c_fc"]["kernel"]
        )
        assert_same(
            mixed.params["h"]["mlp"]["c_fc"]["bias"], want[1][0]["h"]["mlp"]["c_fc"]["bias"]
        )
        assert_same(mixed.opt_state, want[1][1])
        with pytest.raises(ValueError, match="a state that is no more"):
            step(state, batch())
        step(mixed, batch())
        with pytest.raises(ValueError, match="into the file of one that is there"):
            checkpointer.restore_params(step.shapes(), "kernel")


@pytest.mark.slow
@pytest.mark.parametrize("calls", thinned([("__call__",)], slow=[("eval", "grad", "__call__")]))
def test_a_flipped_byte_is_found_where_the_leaf_is_gathered(mesh24, tmp_path, calls):
    step, state = make(mesh24, disk(tmp_path))
    file = state_file(state)
    name = next(n for n in file.names if "params/h/mlp/c_fc/kernel" in n and n.endswith("#1"))
    flip(file.path, file.offset_of(name, file.version) + 5)
    for call in calls:
        with pytest.raises(DamagedStateError, match=r"params/h/mlp/c_fc/kernel\[.*checksum"):
            getattr(step, call)(state, batch())
    assert file.version is on_disk(state.params)[0].version


@pytest.mark.slow
def test_parameters_are_read_whole_and_for_generation(mesh24, tmp_path):
    tokens = {"tokens": batch()["tokens"]}
    found = []
    for place in (Offload(), disk(tmp_path)):
        step = make_step(mesh24, place)
        params = zeroxla.full_params(make(mesh24, Offload())[1])
        shapes = step.abstract_state(tokens)
        given = jax.tree.map(
            lambda x, p, s: jax.device_put(p_stored(p, x), s.sharding),
            params,
            jax.tree.unflatten(jax.tree.structure(params), shapes.placements[0]),
            shapes.params,
        )
        state = step.init_from(given, jax.random.key(1))
        engine = zeroxla.HybridEngine(step, tensor=2)
        rows = engine.generate(
            state, [[1, 2, 3]] * 4, key=jax.random.key(0), max_new_tokens=4, temperature=0
        )
        found.append((zeroxla.full_params(state), rows.tokens, taken(step, state, 2)[1]))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.slow
def test_pretrained_weights_go_to_disk_one_by_one(mesh24, tmp_path, monkeypatch):
    model = models.GPT.tiny(width=64)
    zeroxla.export_params(make(mesh24, Offload())[1], tmp_path / "weights", model=model)
    moves, read, write = [], TensorReader.read, DiskWriter.write

    def read_part(*args):
        if moves[-1:] != ["read"]:  # parts of a leaf, or of several that stay in memory
            moves.append("read")
        return read(*args)

    def write_leaf(self, i, array):
        moves.append("write")
        write(self, i, array)

    monkeypatch.setattr(TensorReader, "read", read_part)
    monkeypatch.setattr(DiskWriter, "write", write_leaf)
    found = []
    for place in (Offload(), disk(tmp_path, optimizer="none")):
        moves.clear()
        step = make_step(mesh24, place)
        step.abstract_state(batch())
        state = zeroxla.from_pretrained(model, tmp_path / "weights", step)
        found.append((zeroxla.full_params(state), taken(step, state, 2)[1]))
    num = len(on_disk(state.params))
    assert "".join(moves).count("readwrite") == num == moves.count("write") > 3
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_what_a_function_gives_for_a_parameter_must_fit(mesh24, tmp_path):
    """If it does not, the state before stays as it is."""
    step, state = make(mesh24, disk(tmp_path))

    def given(x):
        def make():
            shape = tuple(2 * n for n in x.shape) if x is last else x.shape
            return jnp.ones(shape, x.dtype, device=x.sharding)

        return make if isinstance(x, DiskShape) else make()

    shapes = step.shapes().params
    last = [x for x in jax.tree.leaves(shapes) if isinstance(x, DiskShape)][-1]
    with pytest.raises(ValueError, match=r"the leaf .* is float32.*, and the model has float32"):
        step.init_from(jax.tree.map(given, shapes), jax.random.key(0))
    _, losses = taken(step, state, 1)
    assert losses == taken(*make(mesh24, Offload()), 1)[1]


class Anchored(NamedTuple):
    start: Any


def anchored(rate):
    """An optimizer that pulls parameters to where they began: its state is made of theirs."""

    def update(grads, state, params):
        pulled = jax.tree.map(lambda g, p, p0: -rate * (g + p - p0), grads, params, state.start)
        return pulled, state

    return optax.GradientTransformation(Anchored, update)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", thinned(["none"], slow=["host", "disk"]))
def test_optimizer_state_made_of_parameters_on_disk(mesh24, tmp_path, optimizer):
    found = []
    for place in (Offload(), disk(tmp_path, optimizer=optimizer)):
        step = make_step(mesh24, place, optimizer=anchored(1e-2))
        state = step.init(jax.random.key(0), batch())
        kinds = {place_of(x) for x in jax.tree.leaves(state.opt_state) if x.size > 1000}
        state, losses = taken(step, state, 2)
        found.append((losses, jax.tree.map(np.asarray, trained(state))))
    assert kinds == {"device" if optimizer == "none" else optimizer}
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def p_stored(placement, x):
    return np.asarray(placement.stored(jnp.asarray(x)))


@pytest.mark.slow
def test_a_frozen_base_of_wires_is_written_once(mesh24, tmp_path):
    found = []
    for place in (Offload(), disk(tmp_path)):
        model = zeroxla.lora(models.GPT.tiny(width=64), targets="kernel", rank=4, frozen="int8")
        config = ZeroConfig(persistence_threshold=300, offload=place)
        step = zeroxla.make_step(model, mesh24, optax.adam(1e-2), config=config)
        state = step.init(jax.random.key(0), batch())
        state, losses = taken(step, state, 3)
        found.append((losses, jax.tree.map(np.asarray, state.params)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    base = on_disk(state.params["base"])
    assert {x.dtype for x in base} >= {np.dtype(np.uint8)}
    writes = sum(x.kind == "write" for x in state_file(state).blocks.accesses)
    # A block each, and the record.
    assert writes == 1 + sum("/base/" not in name for name in state_file(state).names)


def test_the_table_says_what_is_on_disk(stepped):
    step, _ = stepped
    rows = {row.path: row.placement for row in step.describe().rows}
    assert "on disk" in rows["h/mlp/c_fc/kernel"]


@pytest.mark.slow
def test_other_wires_start_from_what_is_on_disk(mesh24, tmp_path):
    """Copies that weight differences are of are gathered from the disk."""
    found = []
    for place in (Offload(), disk(tmp_path)):
        step, state = make(mesh24, place)
        other = dataclasses.replace(ZeroConfig.zeropp_min(), **SMALL, offload=place)
        state, losses = taken(step.with_config(other), state, 2)
        found.append((losses, state.wire_state))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
