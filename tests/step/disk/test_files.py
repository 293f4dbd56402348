"""Each step has its own file under a path; a file goes with its state, at the latest with its
process."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys

import pytest
from tools.disk import state_file
from tools.offload import batch, make, taken
from tools.quick import quick_collection, quick_compilation  # noqa: F401
from tools.state_file import SIZES, assert_holds, write

from zeroxla import Checkpointer, Offload, ZeroConfig
from zeroxla.mesh.processes import same_program
from zeroxla.mesh.processes.same_program import ProgramCalls
from zeroxla.offload.disk.step_file import StepFile

pytestmark = pytest.mark.usefixtures("quick_compilation", "quick_collection")


@pytest.fixture
def place(tmp_path):
    return Offload(optimizer="disk", sub_group=20_000, path=tmp_path / "state")


def files(place):
    gc.collect()
    return sorted(os.listdir(place.path))


class TestTwoSteps:
    @pytest.mark.slow
    def test_of_one_model_train_side_by_side(self, mesh24, place):
        (one, first), (other, second) = make(mesh24, place), make(mesh24, place)
        expected = taken(*make(mesh24, Offload()), 3)[1]
        losses = ([], [])
        for _ in range(3):
            first, metrics = one(first, batch())
            losses[0].append(float(metrics["loss"]))
            second, metrics = other(second, batch())
            losses[1].append(float(metrics["loss"]))
        assert losses == (expected, expected)
        assert len(files(place)) == 2

    @pytest.mark.slow
    def test_of_different_models_have_different_files(self, mesh24, place):
        found = [make(mesh24, place, model=model) for model in ("scanned", "unrolled")]
        for step, state in found:
            taken(step, state, 1)
        assert len(files(place)) == 2

    def test_of_one_object_share_a_file_and_the_later_state_holds(self, mesh24, place):
        step, state = make(mesh24, place, model="functions")
        state_of_later = step.init(state.key, batch())
        assert state_file(state_of_later) is state_file(state)
        with pytest.raises(ValueError, match="a later step, or a restored checkpoint, has written"):
            step(state, batch())
        assert len(files(place)) == 1


class TestAFile:
    def test_is_removed_with_its_state(self, mesh24, place):
        step, state = make(mesh24, place, model="functions")
        for _ in range(2):
            state, _ = step(state, batch())
        assert len(files(place)) == 1
        del state
        assert files(place) == []

    @pytest.mark.slow
    def test_is_used_again_by_a_checkpoint_that_is_restored(self, mesh24, place, tmp_path):
        step, state = make(mesh24, place)
        state, _ = taken(step, state, 1)
        with Checkpointer(tmp_path / "checkpoints") as checkpointer:
            checkpointer.save(1, state)
            state, expected = taken(step, state, 2)
            state = checkpointer.restore(step).state
        assert len(files(place)) == 1
        assert taken(step, state, 2)[1] == expected

    def test_that_a_killed_process_left_is_removed_and_one_in_use_is_not(self, place):
        code = (
            "import os, signal, sys; from zeroxla.offload.disk.step_file import StepFile; "
            f"file = StepFile({place.path!r}).open({SIZES}); print(file.path.name, flush=True); "
            "sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL) if len(sys.argv) > 1 else None"
        )
        names = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-W", "ignore", "-c", code]
        processes = [subprocess.Popen([*command, *how], **pipes) for how in (["killed"], [])]
        for process in processes:
            names.append(process.stdout.readline().strip())
        killed, lives = processes
        killed.communicate("")
        assert killed.returncode == -signal.SIGKILL
        assert files(place) == sorted(names)
        somebodys = os.path.join(place.path, "zeroxla-x.state")
        with open(somebodys, "w") as file:
            file.write("somebody else's")
        mine = StepFile(place.path).open(SIZES)
        assert files(place) == sorted([names[1], mine.path.name, "zeroxla-x.state"])
        write(mine, 1)
        assert_holds(mine, dict.fromkeys(SIZES, 1))
        lives.communicate("")  # an ordinary end leaves nothing
        assert files(place) == sorted([mine.path.name, "zeroxla-x.state"])

    def test_is_not_removed_by_a_fork_of_its_process(self, place):
        code = (
            "import os; from zeroxla.offload.disk.step_file import StepFile; "
            f"file = StepFile({place.path!r}).open({SIZES}); child = os.fork(); "
            "child and (os.waitpid(child, 0), print(file.blocks.is_there))"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
        )
        assert done.stdout.split() == ["True"], done.stderr


def test_processes_may_have_different_paths(monkeypatch, place):
    """And nothing else of the options may differ."""
    said = []

    def agree_on_program(name, lowered, options):
        said.append(options)

    monkeypatch.setattr(same_program, "agree_on_program", agree_on_program)
    monkeypatch.setattr("jax.process_count", lambda: 2)

    class Program:
        def lower(self):
            return None

        def __call__(self):
            return None

    elsewhere = dataclasses.replace(place, path="/elsewhere")
    for other in (place, elsewhere, dataclasses.replace(place, ratio=0.5)):
        ProgramCalls(ZeroConfig(offload=other))("init", Program())
    assert said[0] == said[1] != said[2]
