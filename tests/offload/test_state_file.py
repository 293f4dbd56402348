"""The file of a state always holds one whole version of all arrays, however its process ends."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.disk import files_limited_to
from tools.state_file import SIZES, assert_holds, content, held, write

from zeroxla.offload.disk.pages import ALIGNMENT
from zeroxla.offload.disk.state_file import DamagedStateError, StateFile


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("zeroxla.offload.disk.state_file.BLOCK_BYTES", 2**20)
    return tmp_path / "folder" / "a.state"


def test_a_version_is_read_as_it_was_written(path):
    file = StateFile(path, SIZES)
    for number in (1, 2, 3):
        write(file, number)
        assert file.version.number == number
        assert_holds(file, dict.fromkeys(SIZES, number))
    # What is not written stays as it is, in this version and in those that follow.
    write(file, 4, ["b"])
    write(file, 5, ["c", "a"])
    assert_holds(file, {"a": 5, "b": 4, "c": 5, "empty": 3})
    file.close()
    file = StateFile(path, SIZES)
    assert file.version.number == 5
    assert_holds(file, {"a": 5, "b": 4, "c": 5, "empty": 3})


def test_blocks_are_aligned_and_go_past_the_page_cache(path):
    file = StateFile(path, SIZES)
    write(file, 1)
    assert not file.blocks.accesses  # nobody watches
    file.blocks.is_watched = True
    write(file, 2)
    held(file)
    assert {x.kind for x in file.blocks.accesses} == {"read", "write"}
    assert all(x.nbytes % ALIGNMENT == 0 for x in file.blocks.accesses)
    assert max(x.nbytes for x in file.blocks.accesses) == 2**20
    if not file.blocks.is_direct:
        pytest.skip("the file system of the temporary folder has no direct access")


def test_what_was_not_put_in_force_is_forgotten(path):
    file = StateFile(path, SIZES)
    write(file, 1)
    file.write("b", content("b", 7))
    file.abandon()
    write(file, 2, ["a"])
    assert_holds(file, {"a": 2, "b": 1, "c": 1, "empty": 1})
    file.write("b", content("b", 7))
    file.close()  # as a process that ends before the step does
    file = StateFile(path, SIZES)
    assert_holds(file, {"a": 2, "b": 1, "c": 1, "empty": 1})


def test_a_failed_write_leaves_the_version_and_nothing_under_way(path, monkeypatch):
    file = StateFile(path, SIZES)
    write(file, 1)
    to_disk = os.pwrite

    def pwrite(fd, data, offset):
        if len(data) == ALIGNMENT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.3)
        return to_disk(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        futures = [f for name in SIZES for f in file.write(name, content(name, 2))]
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.commit()
        assert all(future.done() for future in futures)
    assert_holds(file, dict.fromkeys(SIZES, 1))
    write(file, 3)
    assert_holds(file, dict.fromkeys(SIZES, 3))


def test_a_torn_record_leaves_the_one_before(path):
    file = StateFile(path, SIZES)
    for number in (1, 2):
        write(file, number)
    where = file.record_offset(2)
    file.close()
    for torn in (0, 7, 20):
        with open(path, "r+b") as raw:
            raw.seek(where + torn)
            byte = raw.read(1)[0]
            raw.seek(where + torn)
            raw.write(bytes([byte ^ 0x80]))
        file = StateFile(path, SIZES)
        assert file.version.number == 1
        assert_holds(file, dict.fromkeys(SIZES, 1))
        file.close()


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_flipped_byte_is_found(path, name):
    file = StateFile(path, SIZES)
    write(file, 1)
    with open(path, "r+b") as raw:
        raw.seek(file.offset_of(name, file.version) + SIZES[name] - 1)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))
    with pytest.raises(DamagedStateError, match=rf"^{name} in .*not what was written"):
        held(file)


def test_a_file_that_ends_early(path):
    file = StateFile(path, SIZES)
    write(file, 1)
    os.truncate(path, file.nbytes // 2)
    with pytest.raises(OSError, match="ends at"):
        held(file)


def test_room_is_made_before_anything_is_written(path):
    with files_limited_to(2**20), pytest.raises(ValueError, match=r"needs [\d,]+ bytes.*File too"):
        StateFile(path, SIZES)
    assert not path.exists()


def test_one_process_at_a_time(path):
    file = StateFile(path, SIZES)
    code = (
        "from pathlib import Path; from zeroxla.offload.disk.state_file import StateFile; "
        f"StateFile(Path({str(path)!r}), {SIZES})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is in use by another process" in done.stderr
    file.close()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_state_is_not_written_over(path):
    file = StateFile(path, SIZES)
    write(file, 1)
    file.close()
    with pytest.raises(ValueError, match="holds another state"):
        StateFile(path, {**SIZES, "more": 1})
    path.with_name("text").write_text("some text")
    with pytest.raises(ValueError, match="holds another state"):
        StateFile(path.with_name("text"), SIZES)
    assert path.with_name("text").read_text() == "some text"


def test_a_file_system_without_direct_access(path, monkeypatch):
    real = os.open

    def without(name, flags, *mode):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", without)
    with pytest.warns(UserWarning, match="has no direct access"):
        file = StateFile(path, SIZES)
    assert not file.blocks.is_direct
    write(file, 1)
    assert_holds(file, dict.fromkeys(SIZES, 1))


KILLED = """
import os, random, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from zeroxla.offload.disk import state_file
state_file.BLOCK_BYTES = 2**20
from zeroxla.offload.disk.state_file import StateFile
from tools.state_file import SIZES, assert_holds, write

path, rng = Path({path!r}), random.Random(0)
real = os.pwrite
number = 0
for trial in range(20):
    child = os.fork()
    if not child:
        file = StateFile(path, SIZES)
        assert_holds(file, dict.fromkeys(SIZES, number)) if number else None
        left = rng.randrange(1, 30)

        def pwrite(fd, data, offset):
            global left
            left -= 1
            if left == 0:
                if rng.random() < 0.5:  # in the midst of a write
                    real(fd, memoryview(data)[: len(data) // 8192 * 4096], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, data, offset)

        os.pwrite = pwrite
        while True:
            write(file, file.version.number + 1)
    rng.random(), rng.randrange(100)  # another moment each time
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    file = StateFile(path, SIZES)
    assert file.version.number >= number
    number = file.version.number
    if number:
        assert_holds(file, dict.fromkeys(SIZES, number))
    file.close()
    del file
print("at last", number)
"""


def test_twenty_kills_between_and_amid_writes_leave_a_whole_version(path):
    """Each leaves all arrays as one version has them, and never an older one than before."""
    code = KILLED.format(tests=str(Path(__file__).resolve().parents[1]), path=str(path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 10
