"""Damaged checkpoints are found and passed over; a failed write leaves the others whole."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tools.checkpoints import KEY, assert_same, batch_of, logical, run, steps  # noqa: F401
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla import Checkpointer, SaveError
from zeroxla.checkpoint.about import About

pytestmark = pytest.mark.usefixtures("quick_compilation")


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


# Two kinds of damage are quick, each with another file; `test_all_damaged` has the third one.
FILES = ("data", "about.json", "checksums.rest.json")
QUICK = [("data", flip), ("checksums.rest.json", lose)]
DAMAGES = [*itertools.product(FILES, (flip, cut, lose))]


@pytest.mark.parametrize(
    ("which", "damage"),
    thinned(QUICK, slow=[row for row in DAMAGES if row not in QUICK], rows=True),
)
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


@pytest.mark.smoke
def test_all_damaged(steps, two):
    folder, _ = two
    for number in ("1", "2"):
        cut(data_file(folder / number / "state"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.latest() is None
            with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
                checkpointer.restore(steps[2, 4])


# writes that fail

FULL = """
import contextlib, subprocess, sys
from pathlib import Path
import jax
from tools.checkpoints import *
from tools.disk import files_limited_to
from zeroxla import Checkpointer, SaveError, simulate

simulate(8)
kind, folder = sys.argv[1], Path(sys.argv[2])
asynchronous = sys.argv[3] == "asynchronous"


@contextlib.contextmanager
def full_disk():
    if kind == "limit":  # of any file, in bytes
        with files_limited_to(300):
            yield
        return
    if kind == "read-only":
        mount = ["mount", "-o", "remount"]
        subprocess.run([*mount, "-r", folder], check=True)
        yield
        subprocess.run([*mount, "-w", folder], check=True)
        return
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    yield
    ballast.unlink()


step = step_on((2, 4))
first, _ = run(step, step.init(KEY, batch_of(0)), 0, 1)
checkpointer = Checkpointer(folder, asynchronous=asynchronous, report=lambda t: print("said:", t))
checkpointer.save(1, first)
checkpointer.wait()
kept = logical(first)
state, _ = run(step, first, 1, 1)
with full_disk():
    try:
        checkpointer.save(2, state)
        assert asynchronous
    except SaveError as error:  # at once, where nothing can be written
        assert kind != "limit" or not asynchronous
        print("said:", error)
    state, _ = run(step, state, 2, 1)  # training goes on
    try:
        checkpointer.save(3, state)
        checkpointer.wait()
        print("no error")
    except SaveError as error:
        print("raised:", error)
print(checkpointer.numbers(), sorted(p.name for p in folder.iterdir()))
assert_same(logical(checkpointer.restore(step).state), kept)
state, _ = run(step, state, 3, 1)
assert checkpointer.save(4, state)  # there is space again
checkpointer.wait()
print(checkpointer.numbers())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [*itertools.product(("disk", "limit", "read-only"), ("asynchronous", "synchronous"))],
)
def test_a_disk_that_takes_nothing_leaves_the_earlier_checkpoint_whole_and_training_going_on(
    kind, mode, tmp_path
):
    # In a process of its own: when one array fails, Orbax closes its event loop while tensorstore
    # still completes the others, which then complain at any later time.
    command = [sys.executable, "-c", FULL, kind, str(tmp_path), mode]
    if kind != "limit":
        mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
        if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
            pytest.skip("needs root, to mount a small disk")
        command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "said: the checkpoint of step 2 could not be written" in done.stdout
    assert "raised: the checkpoint of step 3 could not be written" in done.stdout
    assert "the one of step 1 is whole" in done.stdout
    assert "[1] ['1'" in done.stdout
    assert "[1, 4]" in done.stdout


@pytest.fixture
def failing(steps, tmp_path, monkeypatch):
    """A checkpointer with a checkpoint of step 1, whose save of step 2 fails in the background; the
    state, and what is reported."""
    write, said = About.write, []

    def fails(about, folder):
        if about.number == 2:
            raise OSError("no space")
        write(about, folder)

    monkeypatch.setattr(About, "write", fails)
    state = steps[2, 4].init(KEY, batch_of(0))
    checkpointer = Checkpointer(tmp_path, report=said.append)
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    return checkpointer, state, said


LOST = r"the checkpoint of step 2 could not be written to .*: no space; the one of step 1 is whole"


@pytest.mark.parametrize(
    "read",
    thinned(
        [lambda checkpointer, state: checkpointer.restore(state).number],
        slow=[
            lambda checkpointer, state: checkpointer.latest(),
            lambda checkpointer, state: checkpointer.describe().number,
            lambda checkpointer, state: len(checkpointer.restore_params(pattern="Dense_0/")),
        ],
    ),
    ids=["restore", "latest", "describe", "restore_params"],
)
def test_who_reads_after_a_failed_save_is_told_and_gets_what_is_there(failing, read):
    checkpointer, state, said = failing
    assert read(checkpointer, state) == 1
    (text,) = said
    assert re.match(LOST, text)
    assert read(checkpointer, state) == 1
    assert len(said) == 1
    with pytest.raises(SaveError, match=LOST):
        checkpointer.close()


def test_a_failed_save_is_raised_once(failing):
    checkpointer, _, said = failing
    with pytest.raises(SaveError, match=LOST):
        checkpointer.wait()
    assert checkpointer.latest() == 1
    checkpointer.close()
    assert not said


@pytest.mark.parametrize("reads", thinned([True], slow=[False]))
def test_a_save_after_a_failed_one_reports_it_once_and_takes_its_place(failing, reads):
    checkpointer, state, said = failing
    if reads:
        checkpointer.latest()
    assert checkpointer.save(3, state)
    checkpointer.close()
    (text,) = said
    assert re.match(LOST, text)
    assert checkpointer.numbers() == [1, 3]


@pytest.mark.parametrize("has_failed", [True, False])
def test_what_a_dying_write_leaves_is_removed_at_the_end(failing, tmp_path, has_failed):
    """But not where no save failed: another process may be writing."""
    checkpointer, _, _ = failing
    left = tmp_path / "2.orbax-checkpoint-tmp"
    with contextlib.suppress(SaveError):
        checkpointer.wait()
    (left / "d").mkdir(parents=True)
    if has_failed:
        checkpointer.close()
    else:
        Checkpointer(tmp_path).close()
    assert left.exists() != has_failed
    assert (tmp_path / "1").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot make the folder of checkpoints .*/file/x"):
        Checkpointer(tmp_path / "file" / "x")


def test_a_folder_without_write_permission(steps, tmp_path):
    if os.access("/", os.W_OK):
        pytest.skip("permission bits do not bind this user (root)")
    with Checkpointer(tmp_path) as checkpointer:
        tmp_path.chmod(0o500)
        state = steps[2, 4].init(KEY, batch_of(0))
        with pytest.raises(SaveError, match=r"could not be written .* Permission denied"):
            checkpointer.save(1, state)


def test_what_a_killed_write_leaves_is_never_listed(steps, two):
    folder, kept = two
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.numbers() == [1]
        assert_same(logical(checkpointer.restore(steps[2, 4]).state), kept)
        assert checkpointer.save(3, steps[2, 4].init(KEY, batch_of(0)))
        checkpointer.wait()
    assert sorted(p.name for p in folder.iterdir()) == ["1", "3"]
