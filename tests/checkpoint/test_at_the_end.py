"""A program that ends without closing its checkpoints loses none, or says so and fails."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multihost import processes
from tools.checkpoints import KEY, batch_of, steps  # noqa: F401
from tools.quick import QUICK, quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compilation")
SCRIPT = Path(__file__).with_name("ends.py")
NUMBERS = {"a": {"1", "2"}, "b": {"1"}}


def there(folder):
    return {path.name: {x.name for x in path.iterdir()} for path in folder.iterdir()}


def script(*arguments):
    """Run the script; return its exit status, and what it says about errors."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUICK, "PYTHONPATH": root},
    )
    return done.returncode, done.stderr


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("how", "status"), [("raise", 1), slow("return", 0), slow("exit", 3)])
def test_saves_under_way_are_finished_first(how, status, tmp_path):
    """The checkpointers are never closed; one is gone before the script ends."""
    found, said = script(how, str(tmp_path))
    assert found == status, said
    assert there(tmp_path) == NUMBERS
    assert ("RuntimeError: my mistake" in said) == (how == "raise")
    assert "error: " not in said.lower().replace("runtimeerror: my", "")


def test_a_loss_that_nobody_was_told_fails_the_process(tmp_path):
    status, said = script("return", str(tmp_path), "failing")
    assert status == 1
    (line,) = said.splitlines()
    assert line.startswith("error: the checkpoint of step 2 could not be written to ")
    assert line.endswith("/a: no space; the one of step 1 is whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "raise"])
def test_processes_finish_their_saves_together(how, tmp_path):
    """Also where one of them has failed, for which the others do not wait otherwise."""
    status, _, out = processes.launch(SCRIPT, how, tmp_path, devices_per_node=1)
    assert status == (how == "raise"), out
    assert there(tmp_path) == NUMBERS, out


@pytest.mark.slow
def test_a_notebook_s_kernel_finishes_its_saves(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cell = f"import sys; sys.argv = ['ends.py', 'return', {str(tmp_path)!r}]\n{SCRIPT.read_text()}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert there(tmp_path) == NUMBERS


@pytest.fixture
def state(steps):
    return steps[2, 4].init(KEY, batch_of(0))


@pytest.mark.parametrize("number", [1.5, 2.0, True, np.True_, -1, None, "3", np.float32(1)])
def test_a_number_that_is_none_is_refused_at_once(number, state, tmp_path):
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match=r"save\(.*whole number of 0 or more"),
    ):
        checkpointer.save(number, state)
    assert checkpointer.numbers() == []


def test_numbers_of_numpy_and_jax_are_numbers(state, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for number in (np.int64(1), jnp.int32(2), np.array(3)):
            assert checkpointer.save(number, state)
    assert checkpointer.numbers() == [1, 2, 3]


def test_a_state_that_was_given_away_is_refused_at_once(steps, state, tmp_path):
    message = "deleted by the step that it was given to, which took its memory; go on with the"
    with Checkpointer(tmp_path, every=2) as checkpointer:
        steps[2, 4](state, batch_of(0))
        for number in (1, 2):
            with pytest.raises(ValueError, match=message):
                checkpointer.save(number, state)
        rest = steps[2, 4].init(KEY, batch_of(0))
        jax.tree.leaves(rest.opt_state)[-1].delete()
        with pytest.raises(ValueError, match=message):
            checkpointer.save(2, rest)
        with pytest.raises(ValueError, match="the state is a dict, not a TrainState"):
            checkpointer.save(2, zeroxla.full_params(rest))
        assert checkpointer.numbers() == []


def test_nothing_is_saved_after_the_end(state, tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(ValueError, match=r"save\(2\) after close: this Checkpointer of .* has end"):
        checkpointer.save(2, state)
    assert checkpointer.numbers() == [1]
