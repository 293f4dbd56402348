"""A state on disk moves in and out once a step, and a failure never leaves half a step in force."""

import dataclasses
import errno
import os
import threading

import jax
import numpy as np
import pytest
from tools.disk import flip, on_disk, state_file
from tools.offload import (
    MODELS,
    SMALL,
    assert_alike,
    assert_same,
    batch,
    make,
    make_step,
    taken,
    trained,
)
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Checkpointer, Offload
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.offload.disk.state_file import DamagedStateError

pytestmark = pytest.mark.usefixtures("quick_compilation")


def disk(tmp_path, **options):
    options = {"optimizer": "disk", "sub_group": 20_000, **options}
    return Offload(path=tmp_path / "state", **options)


@pytest.mark.slow
def test_what_is_on_disk_is_on_no_device(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path))
    whole = make_step(mesh24, Offload()).abstract_state(batch())
    moments = 2 / 3 * shard_bytes(trained(whole))
    shapes = step.shapes()
    on_disk_bytes = f"{shard_bytes(shapes.opt_state, place='disk'):,} bytes on disk"
    assert on_disk_bytes in str(step.describe())
    assert shard_bytes(shapes.opt_state, place="disk") == pytest.approx(moments, rel=0.01)
    assert shard_bytes(shapes.opt_state) < 0.01 * moments
    assert all(isinstance(x, DiskArray) for x in jax.tree.leaves(state.opt_state) if x.size >= 8)
    file = state_file(state)
    # Two versions, and less than a page for each shard.
    assert file.nbytes == os.path.getsize(file.path)
    assert 2 * file.array_bytes <= file.nbytes < 2 * file.array_bytes + 4096 * 8 * 120


@pytest.mark.parametrize("model", thinned(["functions"], slow=["unrolled"]))
def test_a_step_moves_the_state_once_in_and_once_out_beside_the_update(mesh24, tmp_path, model):
    step, state = make(mesh24, disk(tmp_path, sub_group=1000), model=model)
    state, _ = step(state, batch())
    state, metrics = step(state, batch())
    accesses = state_file(state).blocks.accesses
    moved = {kind: sum(x.nbytes for x in accesses if x.kind == kind) for kind in ("read", "write")}
    file = state_file(state)
    # What is written at last says which version is in force.
    assert 0 < moved["write"] - moved["read"] <= 2 * 4096
    assert file.array_bytes <= moved["read"] <= file.array_bytes + 4096 * len(file.names)
    assert metrics["disk_read_bytes_per_s"] > 0
    updates = [x for x in accesses if x.kind == "update"]
    groups = step.disk.update_of(state).sub_groups.groups
    assert len(updates) == len(groups) > 4
    # Before anything is written, two sub-groups are read, each shard a block; and no third.
    first_write = min(x.begun for x in accesses if x.kind == "write")
    before = sum(x.kind == "read" and x.begun < first_write for x in accesses)
    assert before == 8 * sum(len(group.arrays) for group in groups[:2])


@pytest.mark.slow
def test_a_checkpoint_is_of_the_step_it_was_saved_after(mesh24, tmp_path):
    """While it is written, steps go on; it opens in another memory, and back on disk."""
    place = disk(tmp_path)
    step, state = make(mesh24, place)
    state, _ = taken(step, state, 2)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(2, state)
        state, want = taken(step, state, 3)
        want = want, jax.tree.map(np.asarray, trained(state))
        for other in (place, Offload(optimizer="host")):
            step = make_step(mesh24, other)
            step.abstract_state(batch())
            restored = checkpointer.restore(step)
            assert restored.number == 2
            assert bool(on_disk(trained(restored.state))) == (other is place)
            found, losses = taken(step, restored.state, 3)
            assert_alike((losses, trained(found)), want)
        with pytest.raises(ValueError, match="pass the step"):
            checkpointer.restore(make_step(mesh24, place).abstract_state(batch()))


def test_a_step_waits_for_a_checkpoint_to_read_what_it_would_write_over(
    mesh24, tmp_path, monkeypatch
):
    step, state = make(mesh24, disk(tmp_path), model="functions")
    file, version = state_file(state), state_file(state).version
    array = on_disk(trained(state))[0]
    before = np.asarray(array)
    file.hold(version)
    state, _ = step(state, batch())
    assert_same(np.asarray(array), before)  # still there, while it is held
    happened, wait, write = [], file.wait_for_readers, file.write

    def let_go():
        assert_same(np.asarray(array), before)
        happened.append("let go")
        file.let_go(version)

    def wait_for_readers():
        happened.append("wait")
        threading.Timer(0.5, let_go).start()
        wait()
        happened.append("go on")

    def write_array(name, data):
        happened.append("write")
        return write(name, data)

    monkeypatch.setattr(file, "wait_for_readers", wait_for_readers)
    monkeypatch.setattr(file, "write", write_array)
    step(state, batch())
    assert happened[:3] == ["wait", "let go", "go on"]
    assert set(happened[3:]) == {"write"}
    with pytest.raises(ValueError, match="a state that is no more"):
        np.asarray(array)


def test_a_state_is_spent_by_its_step(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path), model="functions")
    new, _ = step(state, batch())
    with pytest.raises(ValueError, match="was deleted by the step"):
        step(state, batch())
    # A second state of the step goes on in its file.
    anew = step.init(jax.random.key(0), batch())
    with pytest.raises(ValueError, match="a later step, or a restored checkpoint, has written"):
        step(new, batch())
    step(anew, batch())


@pytest.mark.slow
def test_a_flipped_byte_is_found_and_the_leaf_named(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path))
    state, _ = taken(step, state, 1)
    with Checkpointer(tmp_path / "checkpoints", asynchronous=False) as checkpointer:
        checkpointer.save(1, state)
        file = state_file(state)
        name = next(n for n in file.names if "nu/h/mlp/c_fc/kernel" in n)
        flip(file.path, file.offset_of(name, file.version) + 5)
        with pytest.raises(DamagedStateError, match=r"nu/h/mlp/c_fc/kernel\[.*checksum of block"):
            step(state, batch())
        # Nothing of that step is in force, and the checkpoint is another file.
        state = checkpointer.restore(step).state
        _, losses = taken(step, state, 1)
    step, state = make(mesh24, Offload())
    assert losses == taken(step, state, 2)[1][1:]


def test_a_removed_file_is_found(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path), model="functions")
    state_file(state).path.unlink()
    with pytest.raises(DamagedStateError, match="was removed or replaced"):
        step(state, batch())


def test_a_disk_that_fails_puts_nothing_in_force(mesh24, tmp_path, monkeypatch):
    step, state = make(mesh24, disk(tmp_path), model="functions")
    state, _ = taken(step, state, 1)
    file, version = state_file(state), state_file(state).version
    real, calls = os.pwrite, []

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            step(state, batch())
    assert file.version is version
    state = step.init(jax.random.key(0), batch())
    assert state_file(state) is file  # which serves on
    taken(step, state, 1)


def test_bad_paths(mesh24, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"needs a folder: pass path="):
        Offload(optimizer="disk")
    with pytest.raises(ValueError, match=r"params='disk'.*needs a folder"):
        Offload(params="disk")

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be kept in .*file.*give a folder"):
        make(mesh24, Offload(optimizer="disk", path=tmp_path / "file"))

    usage = type("Usage", (), {"free": 12345})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(ValueError, match=r"needs [\d,]+ bytes in .*and 12,345 are free"):
            make(mesh24, disk(tmp_path))
    assert not list((tmp_path / "state").iterdir())


def test_a_step_is_drawn(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path), model="functions")
    with pytest.raises(ValueError, match="no step has been taken with this state on disk"):
        zeroxla.inspect.plot_disk(state)
    state, _ = step(state, batch())
    (axes,) = zeroxla.inspect.plot_disk(state, path=tmp_path / "step.png").axes
    assert [label.get_text().split(",")[0] for label in axes.get_yticklabels()] == [
        *("read", "update", "write"),
    ]
    read, updated, written = (len(bars.get_paths()) for bars in axes.collections)
    assert read == written - 1 > 0  # a block more is the record
    assert updated == len(step.disk.update_of(state).sub_groups.groups)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    _, plain = make(mesh24, Offload(), model="functions")
    with pytest.raises(ValueError, match="nothing of this state is on disk"):
        zeroxla.inspect.plot_disk(plain)


def test_a_plan_counts_the_disk(tmp_path):
    found = {}
    for name, place in {"devices": Offload(), "disk": disk(tmp_path)}.items():
        config = zeroxla.ZeroConfig(offload=place, **SMALL)
        mesh, rows = {"node": 2, "device": 4}, batch()
        found[name] = zeroxla.plan(MODELS["scanned"](), mesh, rows, config=config)
    plain, there = found["devices"].memory, found["disk"].memory
    assert there.state_bytes + there.disk_bytes == plain.state_bytes
    assert there.disk_bytes == pytest.approx(2 * there.parameter_bytes, rel=0.01)
    assert there.offloaded_bytes == 0
    assert "its state on the host's disk" in str(found["disk"])
    # The devices of a node share its disk, which reads and writes at the same time.
    link = found["disk"].target.links["disk"]
    slow = dataclasses.replace(link, bytes_per_s=1000.0, latency_s=0.0)
    slowed = found["disk"].on(links={"disk": slow}).time
    assert slowed.busy_s["disk"] == pytest.approx(4 * there.disk_bytes / 1000)
    assert slowed.seconds > slowed.busy_s["disk"]
    assert "disk" not in found["devices"].time.busy_s
    assert not (tmp_path / "state").exists()


def test_a_plan_counts_what_is_read_to_be_gathered(tmp_path):
    mesh, found = {"node": 2, "device": 4}, []
    for params in ("none", "disk"):
        place = dataclasses.replace(disk(tmp_path), params=params)
        config = zeroxla.ZeroConfig(offload=place, **SMALL)
        plan = zeroxla.plan(MODELS["scanned"](), mesh, batch(), config=config)
        slow = dataclasses.replace(plan.target.links["disk"], bytes_per_s=1000.0, latency_s=0.0)
        read = plan.on(links={"disk": slow}).time.busy_s["disk"] * 1000 / 4 - plan.memory.disk_bytes
        found.append((plan, read))
    (plain, nothing), (there, read) = found
    assert nothing == pytest.approx(0, abs=1)
    master = there.memory.disk_bytes - plain.memory.disk_bytes
    assert master == plain.memory.parameter_bytes
    # Once forward, and backward what it needs again.
    assert 1.5 * master < read < 2.01 * master
    assert there.comms.total_bytes() == plain.comms.total_bytes()


@pytest.mark.slow
def test_what_needs_no_update_leaves_the_disk_alone(mesh24, tmp_path):
    step, state = make(mesh24, disk(tmp_path))
    state, _ = taken(step, state, 1)
    file = state_file(state)
    file.blocks.accesses.clear()
    file.blocks.is_watched = True
    in_memory = make_step(mesh24, Offload())
    other, _ = taken(in_memory, in_memory.init(jax.random.key(0), batch()), 1)
    assert step.eval(state, batch()) == in_memory.eval(other, batch())
    assert_same(step.grad(state, batch()), in_memory.grad(other, batch()))
    compiled = step.lower(state, batch()).compile()
    assert zeroxla.inspect.memory(compiled).total_bytes > 0
    assert not file.blocks.accesses
