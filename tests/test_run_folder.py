"""The run folder and its checkpoints: what is written, and that failing writes lose nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.checkpoint import Checkpoints, SaveError  # noqa: F401 (used by a script below)
from zeroxla.run_folder import RunFolder, RunFolderError, has_checkpoint, read_config


@contextlib.contextmanager
def files_limited_to(num_bytes):
    """Make writes past `num_bytes` of any file fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_events(path):
    """Return {(tag, step): value} and the steps at which a session started."""
    from tensorboardX.proto.event_pb2 import Event

    scalars, starts = {}, []
    for file in sorted(path.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            scalars |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            if event.HasField("session_log"):
                starts.append(event.step)
    return scalars, starts


REPOSITORY = Path(__file__).resolve().parent.parent


class TestMetrics:
    @pytest.mark.smoke
    def test_lines_and_events_hold_the_same_values(self, tmp_path):
        folder = RunFolder.create(tmp_path / "run", {"seed": 3})
        folder.log(1, {"loss": 2.5, "skipped": 0})
        folder.log(2, {"loss": 2.25})
        folder.close()
        assert folder.metrics() == [
            {"step": 1, "loss": 2.5, "skipped": 0},
            {"step": 2, "loss": 2.25},
        ]
        scalars, _ = read_events(folder.path)
        assert scalars == {("loss", 1): 2.5, ("skipped", 1): 0, ("loss", 2): 2.25}
        assert read_config(folder.path) == {"seed": 3}

    def test_non_finite_values_stay_valid_json(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        folder.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None}
        folder.close()

    def test_reopening_drops_the_steps_after_the_checkpoint(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        for step in range(1, 6):
            folder.log(step, {"loss": float(step)})
        folder.close()
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "lo')  # a crash in the middle of a line

        folder = RunFolder.reopen(tmp_path, step=3)
        folder.log(4, {"loss": 40.0})
        folder.close()
        assert [line["loss"] for line in folder.metrics()] == [1, 2, 3, 40]
        scalars, starts = read_events(tmp_path)
        assert starts == [4]
        assert scalars["loss", 4] == 40

    def test_a_full_disk_is_reported_once_and_loses_no_line(self, tmp_path):
        reports = []
        folder = RunFolder.create(tmp_path, {}, reports.append)
        folder.log(1, {"loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with files_limited_to(size + 5):
            folder.log(2, {"loss": 2.0})
            folder.log(3, {"loss": 3.0})
            assert [line["step"] for line in folder.metrics()] == [1]
            assert len(reports) == 1
            assert "cannot write metrics" in reports[0]
            with pytest.raises(RunFolderError, match="2 lines could not be written"):
                folder.close()
        folder.log(4, {"loss": 4.0})
        folder.close()
        assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4]
        assert len(reports) == 2
        assert "again" in reports[1]
        scalars, _ = read_events(tmp_path)
        assert [scalars["loss", step] for step in (1, 2, 3, 4)] == [1, 2, 3, 4]

    def test_device_without_space(self, tmp_path):
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full, a Linux device whose writes fail with ENOSPC")
        reports = []
        folder = RunFolder.create(tmp_path, {}, reports.append)
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        folder.log(1, {"loss": 1.0})
        assert "No space left on device" in reports[0]


class TestFiles:
    def test_plot_is_a_picture(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        folder.plot(unigram_entropy=3.2)  # no metrics yet
        folder.log(1, {"loss": 3.0})
        folder.log(2, {"loss": float("nan"), "valid_loss": 2.5})
        folder.plot(unigram_entropy=3.2)
        picture = (tmp_path / "loss.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
        folder.close()

    def test_a_failed_write_keeps_the_old_file(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        folder.write_text("sample.txt", "old")
        with files_limited_to(100), pytest.raises(RunFolderError, match=r"cannot write .*sample"):
            folder.write_text("sample.txt", "new" * 100)
        assert (tmp_path / "sample.txt").read_text() == "old"
        assert not list(tmp_path.glob(".*.tmp"))

    def test_folder_below_a_file_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot write the run folder .*Not a directory"):
            RunFolder.create(tmp_path / "file" / "run", {})

    def test_folder_without_write_permission(self, tmp_path):
        tmp_path.chmod(0o500)
        if os.access(tmp_path, os.W_OK):
            pytest.skip("permission bits do not bind this user (root)")
        with pytest.raises(ValueError, match=r"cannot write the run folder .*Permission denied"):
            RunFolder.create(tmp_path, {})

    def test_a_run_with_checkpoints_is_not_overwritten(self, tmp_path):
        RunFolder.create(tmp_path, {"first": True}).close()
        RunFolder.create(tmp_path, {"second": True}).close()  # nothing was saved: may be replaced
        (tmp_path / "checkpoints" / "10").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"already holds a run; continue it with --resume"):
            RunFolder.create(tmp_path, {"third": True})
        assert read_config(tmp_path) == {"second": True}

    def test_a_folder_of_other_things_is_not_touched(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("somebody else's")
        with pytest.raises(ValueError, match="is not empty and holds no run"):
            RunFolder.create(tmp_path, {})
        assert (tmp_path / "metrics.jsonl").read_text() == "somebody else's"

    def test_no_run_to_read(self, tmp_path):
        with pytest.raises(ValueError, match="holds no run to resume"):
            read_config(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            read_config(tmp_path)


def make_state(mesh, seed):
    """A state with every kind of leaf: sharded, replicated, scalar, key, None, empty."""
    sharded = NamedSharding(mesh, PartitionSpec(("device", "node")))
    w = jax.device_put(jax.random.normal(jax.random.key(seed), (64, 128)), sharded)
    params = {"w": w, "b": jax.device_put(jnp.full(3, seed, jnp.bfloat16))}
    return {
        "step": jnp.int32(seed),
        "params": params,
        "opt_state": optax.adamw(1e-3).init(params),
        "key": jax.random.key(seed),
        "loss_scale": None,
        "wire_state": (),
    }


def assert_equal_states(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        assert x.sharding == y.sharding
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


class TestCheckpoints:
    @pytest.mark.smoke
    def test_restores_bit_exactly_with_position_and_sharding(self, tmp_path, mesh24):
        checkpoints = Checkpoints(tmp_path / "c", keep=2)
        state = make_state(mesh24, 7)
        checkpoints.save(7, state, {"next_index": 70})
        checkpoints.close()

        step, restored, position = Checkpoints(tmp_path / "c", keep=2).restore(
            make_state(mesh24, 0)
        )
        assert (step, position) == (7, {"next_index": 70})
        assert_equal_states(restored, state)

    def test_keeps_the_newest(self, tmp_path, mesh24):
        checkpoints = Checkpoints(tmp_path, keep=2)
        for step in (1, 2, 2, 3):
            checkpoints.save(step, make_state(mesh24, step), {"next_index": step})
        assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
        assert checkpoints.latest() == 3
        checkpoints.close()

    def test_a_full_disk_leaves_the_earlier_checkpoint_whole(self, tmp_path, mesh24):
        # In a process of its own: when one array fails, Orbax closes its event loop while
        # tensorstore still completes the others, which then complain at any later time.
        script = f"""
from pathlib import Path
from tests.test_run_folder import *
from zeroxla.mesh import make_mesh
mesh, folder = make_mesh(nodes=2, devices_per_node=4), Path({str(tmp_path)!r})
checkpoints = Checkpoints(folder, keep=1)
checkpoints.save(1, make_state(mesh, 1), {{"next_index": 1}})
try:
    with files_limited_to(10_000):
        checkpoints.save(2, make_state(mesh, 2), {{"next_index": 2}})
except SaveError as error:
    print(error)
print([p.name for p in folder.iterdir() if p.name.isdigit()])
assert_equal_states(checkpoints.restore(make_state(mesh, 0))[1], make_state(mesh, 1))
checkpoints.save(3, make_state(mesh, 3), {{"next_index": 3}})  # there is space again
"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stderr
        assert "the checkpoint of step 2 could not be written" in done.stdout
        assert "the one of step 1 is whole" in done.stdout
        assert "['1']" in done.stdout
        step, restored, _ = Checkpoints(tmp_path, keep=1).restore(make_state(mesh24, 0))
        assert step == 3
        assert_equal_states(restored, make_state(mesh24, 3))

    def test_restoring_from_nothing(self, tmp_path, mesh24):
        checkpoints = Checkpoints(tmp_path, keep=1)
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            checkpoints.restore(make_state(mesh24, 0))
        checkpoints.close()

    def test_another_model_is_refused_by_the_name_of_a_leaf(self, tmp_path, mesh24):
        checkpoints = Checkpoints(tmp_path, keep=1)
        state = make_state(mesh24, 1)
        checkpoints.save(1, state, {})
        other = {**state, "params": {**state["params"], "b": jnp.zeros(4, jnp.bfloat16)}}
        with pytest.raises(ValueError, match=r"its params\.b is \(3,\), and here it is \(4,\)"):
            checkpoints.restore(other)
        other = {**state, "opt_state": optax.sgd(1e-3).init(state["params"])}
        with pytest.raises(ValueError, match=r"its opt_state\.0\.count .* here it is missing"):
            checkpoints.restore(other)
        checkpoints.close()

    def test_only_complete_checkpoints_count(self, tmp_path, mesh24):
        assert not has_checkpoint(tmp_path)
        (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
        assert not has_checkpoint(tmp_path)
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        checkpoints.save(5, make_state(mesh24, 5), {})
        checkpoints.close()
        assert has_checkpoint(tmp_path)
