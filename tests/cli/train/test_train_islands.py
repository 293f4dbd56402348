"""`zeroxla train` as islands."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from multihost import processes
from tools.islands import KEY, TOKEN, batches, coordinator, make_step
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train, values

import zeroxla
from zeroxla.cli.data.text import training_batches
from zeroxla.cli.main import main
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.train.island import AsIsland, move_to, num_taken, seed_of, status_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "0", "--persistence-threshold", "0"),
    *("--outer", "streaming", "--outer-every", "4"),
]


def drawn(slot, num=3, skip=0):
    """Return the first batches of an island, after some that are skipped."""
    text = np.arange(5000, dtype=np.int64) % 251
    found = iter(training_batches(text, batch=2, length=8, seed=seed_of(7, slot)))
    move_to(found, skip)
    assert num_taken(found) == skip
    rows = [batch["tokens"] for batch in itertools.islice(found, num)]
    assert num_taken(found) == skip + num
    return np.stack(rows)


def test_each_island_has_its_own_order_of_the_data():
    alone = iter(training_batches(np.arange(5000) % 251, batch=2, length=8, seed=7))
    np.testing.assert_array_equal(drawn(0)[0], next(alone)["tokens"])
    orders = [drawn(slot) for slot in (0, 1, 2, 2**31 - 1)]
    for one, other in itertools.combinations(orders, 2):
        assert not (one == other).all()
    with pytest.raises(ValueError, match="slot 2147483648 of an island; take one between 0 and"):
        seed_of(7, 2**31)


def test_an_island_that_comes_back_skips_what_its_slot_has_had():
    np.testing.assert_array_equal(drawn(1, num=2, skip=5), drawn(1, num=7)[5:])


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"loss": 1.0}, ""),
        ({"islands": 2, "rounds_behind": 0, "coordinator": True}, ", 2 islands"),
        (
            {"islands": 1, "rounds_behind": 3, "coordinator": False},
            ", 1 islands, 3 rounds behind, no coordinator",
        ),
    ],
)
def test_the_progress_says_who_is_there(metrics, text):
    assert status_of(metrics) == text


def test_a_lost_coordinator_is_told_once_and_when_it_is_back(monkeypatch, tmp_path):
    (batch,), said = batches(1), []
    step = make_step(zeroxla.Outer(every=1000), 0, 1)
    rows = iter(training_batches(np.arange(99), batch=1, length=8, seed=0))
    state = step.init(KEY, batch)
    monkeypatch.setenv("ZEROXLA_ISLANDS_TOKEN", TOKEN)

    def until(state, is_led):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            state, metrics = island.step(state, batch)
            if metrics["coordinator"] == is_led:
                return state
            time.sleep(0.05)
        raise AssertionError(said)

    with coordinator(1, state=tmp_path / "file") as first:
        monkeypatch.setenv("ZEROXLA_ISLANDS", first.address)
        island = AsIsland(step, 0, said.append)
        state = until(island.begin(state, rows, 16, resumed=False), True)
        assert said == []
    state = until(state, False)
    state, _ = island.step(state, batch)
    assert [text.partition(";")[0] for text in said] == ["the islands' coordinator is out of reach"]
    with zeroxla.Coordinator(first.address, TOKEN, num_islands=1, state=tmp_path / "file"):
        until(state, True)
        assert said[1:] == ["the islands' coordinator is there again"]
        island.close()


@pytest.mark.slow
def test_islands_train_evaluate_and_go_on(text, tmp_path):
    run = tmp_path / "run"
    command = ["train", "--run", run, "--data", text, *TINY, "--islands", 2, "--steps", 9]
    status, out = processes.zeroxla(*command)
    assert status == 0, out
    assert "launch: coordinator: islands 0, 1 begin at round 0" in out
    losses = [values(run / f"island-{slot}", "loss") for slot in (0, 1)]
    assert [list(x) for x in losses] == [list(range(1, 10))] * 2
    assert losses[0] != losses[1]  # each has its own part of the data
    configs = [json.loads((run / f"island-{i}" / "config.json").read_text()) for i in (0, 1)]
    assert configs[0]["mesh"] == {"node": 2, "device": 2}
    assert configs[0]["text"] == configs[1]["text"]
    for name in ("outer_bytes", "outer_s", "rounds_behind", "coordinator"):
        assert values(run / "island-1", name)
    assert set(values(run / "island-0", "islands").values()) == {2}
    assert list(values(run / "island-0", "valid_loss")) == [9]

    status, out = processes.zeroxla("train", "--resume", "--run", run, "--steps", 12)
    assert status == 0, out
    assert "[island 1] Resuming" in out
    assert [list(values(run / f"island-{i}", "loss")) for i in (0, 1)] == [list(range(1, 13))] * 2
    status, out = processes.zeroxla(*command)
    assert status != 0
    assert f"already holds a run; continue it with --resume --run {run}" in out


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["streaming", "diloco"])
def test_an_export_of_each_island_has_the_loss_that_was_reported(outer, text, tmp_path):
    """The parameters that all islands share; the island's own where they are asked for."""
    run, tiny = tmp_path / "run", [*TINY[:-4], "--data", text]
    more = ["--outer", outer, "--outer-every", 10, "--islands", 2, "--steps", 25]
    checkpoints = ["--eval-every", 5, "--save-every", 5, "--keep", 9]
    status, out = processes.zeroxla("train", "--run", run, *tiny, *more, *checkpoints)
    assert status == 0, out
    exports = {}
    for slot, step, own in ((0, 25, False), (1, 25, False), (1, 15, False), (1, 25, True)):
        island, output = run / f"island-{slot}", tmp_path / f"export-{slot}-{step}-{own}"
        reported = values(island, "valid_loss")[step]
        word = ["--island-own"] if own else []
        assert main(["export", str(island), f"--step={step}", f"--output={output}", *word]) == 0
        if slot == 1:
            again = tmp_path / f"again-{step}-{own}"
            assert train("--init", output, "--run", again, *tiny[6:], "--steps", 1,
                         "--learning-rate", 1e-30) == 0  # fmt: skip
            (loss,) = values(again, "valid_loss").values()
            assert (abs(loss - reported) < 1e-6) != own
        exports[slot, step, own] = (output / "model.safetensors").read_bytes()
    assert exports[0, 25, False] == exports[1, 25, False]
    assert exports[1, 25, False] != exports[1, 25, True]
    command = ["generate", str(run / "island-1"), "--prompt=a", "--temperature=0"]
    assert main([*command, "--max-new-tokens=3", "--island-own"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [10, 10_000], ids=["with a checkpoint", "without one"])
def test_an_island_that_is_killed_comes_back(save_every, text, tmp_path):
    """The other one goes on, and the one that comes back goes on with it to the end."""
    run, steps = tmp_path / "run", 2000  # enough for one that compiles to come back in time
    train = ["train", "--run", run, "--data", text, *TINY, "--steps", steps]
    program = [sys.executable, "-m", "zeroxla", *train, "--save-every", save_every]
    launch = ["launch", "--islands", 2, "--devices-per-node", 2, "--max-restarts", 1]
    launcher = processes.start(
        ["-m", "zeroxla", *launch, "--round-deadline", 20, "--", *program, "--outer-every", 20]
    )
    folder = run / "island-1"
    while not (folder / "metrics.jsonl").exists() or len(RunFolder(folder).metrics()) < 30:
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.02)
    os.kill(processes.working_on(run, "ZEROXLA_SLOT=1"), signal.SIGKILL)
    status, out = processes.finish(launcher, timeout=600)
    assert status == 0, out
    assert "launch: island 1: Rank 0" in out
    assert "was killed by SIGKILL" in out
    assert "launch: island 1: starting again (1 of 1 left)" in out
    assert ("[island 1] Resuming" in out) == (save_every == 10)
    for slot in (0, 1):
        assert max(values(run / f"island-{slot}", "loss")) == steps
        (loss,) = list(values(run / f"island-{slot}", "valid_loss").values())[-1:]
        assert loss < 2
    back = values(folder, "islands")
    assert back[max(back)] >= 1
    assert 2 in back.values()
