"""`Store`: the numbered checkpoints in a folder, kept by Orbax's `CheckpointManager`.

A checkpoint is whole or not there. `Checkpointer` adds the training state to this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroxla.checkpoint.about import About
from zeroxla.checkpoint.checksums import find_damage
from zeroxla.checkpoint.entries import Entry, empty
from zeroxla.checkpoint.errors import SaveError, full_disk, quiet_absl, room, root_cause
from zeroxla.checkpoint.orbax_handler import SAVE_TIMEOUT_S, RestoreState, SaveState, StateHandler
from zeroxla.mesh.processes.ending import before_leaving, leave
from zeroxla.mesh.processes.exchange import exchange, on_first
from zeroxla.program.compat import before_threads_end
from zeroxla.program.paths import Path as Name
from zeroxla.program.report import format_bytes

STATE = "state"

EXIT_TIMEOUT_S = 600
"""Seconds that a process waits for the other ones at its end, which may be dead, until its last
save counts as lost."""

_saves = itertools.count()  # the same in all processes, which make the same saves
_unsettled: set[Store] = set()
"""Stores with a save that nobody has waited for, or whose failure nobody has been told. They are
held here because a script may drop its `Checkpointer` while files are being written."""
_ending = threading.Lock()
_lost: list[str] = []
"""What was lost at the end of the process, in words."""


class Store:
    """Numbered states in a folder. If there are several processes, all make the same calls.

    Args:
      folder: the folder; made if missing.
      keep: how many states to keep. None keeps all.
      asynchronous: whether `save` leaves the writing to a thread.

    Raises:
      ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int | None, asynchronous: bool) -> None:
        self.folder = folder
        self._saving: int | None = None  # the number that is being saved, or was saved last
        self._saving_bytes = 0  # of the arrays of that state
        self._failure: SaveError | None = None  # why the last save failed, until it is raised
        self._has_failed = False  # whether any save has
        self._has_reported = False  # whether that failure has been reported
        self._damage: dict[int, str | None] = {}  # of the checkpoints that were looked at
        self.is_closed = False
        try:
            self._manager = ocp.CheckpointManager(
                folder,
                # The item is named here so that its metadata can be read before the first save.
                item_handlers={STATE: StateHandler()},
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    enable_async_checkpointing=asynchronous,
                    async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S),
                    create=True,
                ),
            )
        except OSError as error:
            raise ValueError(
                f"cannot make the folder of checkpoints {folder}: {error.strerror}; correct the "
                "path or its permissions"
            ) from error

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that are there, ascending."""
        return sorted(self._manager.all_steps())

    def folder_of(self, number: int) -> Path:
        return self.folder / str(number) / STATE

    def save(self, number: int, found: Mapping[Name, Entry], about: About) -> None:
        """Write a state. An earlier failure, which the caller has reported, is no longer raised.

        Raises:
          SaveError: it could not be written.
        """
        self._failure = None
        stored = {path: entry for path, entry in found.items() if entry.array.size}
        arrays = SaveState(stored, about, name=f"save {next(_saves)}")
        self._saving = number
        self._saving_bytes = sum(e.array.size * e.array.dtype.itemsize for e in stored.values())
        _watch_the_end()
        _unsettled.add(self)
        try:
            with self._failing_as_save_error():
                on_first("folder of checkpoints", lambda: self._make_room(number))
                self._manager.save(number, args=ocp.args.Composite(**{STATE: arrays}), force=True)
        except BaseException:
            _unsettled.discard(self)  # the caller is told
            raise
        self._damage[number] = None

    def wait(self) -> None:
        """Wait until the last save is whole.

        Raises:
          SaveError: it could not be written. It is raised once.
        """
        self._settle()
        failure, self._failure = self._failure, None
        _unsettled.discard(self)
        if failure is not None:
            raise failure

    def wait_and_report(self, report: Callable[[str], None]) -> None:
        """Wait until the last save is whole. If it failed, report that once; `wait` still raises
        it."""
        self._settle()
        if self._failure is not None and not self._has_reported:
            self._has_reported = True
            report(str(self._failure))

    def read(self, number: int, targets: Mapping[Name, jax.ShapeDtypeStruct]) -> dict[Name, Any]:
        """Read arrays onto the shardings of the targets, padded with zeros up to their shapes."""
        with quiet_absl():
            read = ocp.args.Composite(**{STATE: RestoreState(targets)})
            return self._manager.restore(number, args=read)[STATE]

    def read_entries(self, number: int, wanted: Mapping[Name, Entry]) -> dict[Name, jax.Array]:
        """Read arrays onto a mesh, as their entries say that a state stores them."""
        targets = {
            path: jax.ShapeDtypeStruct(e.array.shape, e.array.dtype, sharding=e.array.sharding)
            for path, e in wanted.items()
            if e.array.size
        }
        without_elements = {path: empty(e) for path, e in wanted.items() if not e.array.size}
        return without_elements | (self.read(number, targets) if targets else {})

    def damage(self, number: int) -> str | None:
        """Describe the damage to a checkpoint; return None if there is none.

        Cost: the first call reads its files, each process a part of them.
        """
        if number not in self._damage:
            part, parts = jax.process_index(), jax.process_count()
            found = find_damage(self.folder_of(number), part=part, parts=parts)
            said = exchange(f"checkpoint of step {number}", found or "")
            self._damage[number] = next(filter(None, said), None)
        return self._damage[number]

    def about(self, number: int) -> About:
        """Return the description of a checkpoint."""
        return About.read(self.folder_of(number))

    def listed(self, number: int | None, report: Callable[[str], None]) -> int:
        """Return the number if its checkpoint is there; for None, the newest number. Report a save
        that failed.

        Raises:
          ValueError: that checkpoint is not there, or none is.
        """
        self.wait_and_report(report)
        numbers = self.numbers()
        if number in numbers:
            return number
        if number is None and numbers:
            return numbers[-1]
        there = ", ".join(map(str, numbers)) or "none"
        raise ValueError(
            f"{self.folder} holds no complete checkpoint"
            + ("" if number is None else f" of step {number}")
            + f" (there: {there}); start the run anew, or name another folder"
        )

    def latest(self, report: Callable[[str], None]) -> int | None:
        """Return the newest number whose checkpoint is undamaged; None if there is none. Report
        damaged checkpoints, and a save that failed."""
        self.wait_and_report(report)
        for number in reversed(self.numbers()):
            damage = self.damage(number)
            if damage is None:
                return number
            report(f"the checkpoint of step {number} is damaged and passed over: {damage}")
        return None

    def whole(self, number: int | None, report: Callable[[str], None]) -> int:
        """Return the number if its checkpoint is there and undamaged; for None, as `latest`.

        Raises:
          ValueError: it is missing or damaged; for None, there is no undamaged one.
        """
        listed = self.listed(number, report)
        if number is None:
            found = self.latest(report)
            if found is None:
                raise ValueError(
                    f"every checkpoint in {self.folder} is damaged; of the newest, "
                    f"{self.damage(listed)}"
                )
            return found
        if damage := self.damage(listed):
            others = ", ".join(str(n) for n in self.numbers() if n != number) or "there is no other"
            raise ValueError(
                f"the checkpoint of step {number} is damaged: {damage}; restore another one: "
                f"{others}"
            )
        return listed

    def delete(self, number: int) -> None:
        """Delete a checkpoint."""
        self._manager.delete(number)
        self._damage.pop(number, None)

    def close(self) -> None:
        """Wait for the last save, and release threads. A store that is closed does nothing.

        Raises:
          SaveError: the last save could not be written.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # has been raised above
                self._manager.close()
            # Folders of another process, which may be saving, are not this one's to remove.
            if self._has_failed:
                self._remove_leftovers()

    def _settle(self) -> None:
        """Wait until the last save has ended, and remember if it failed."""
        try:
            with self._failing_as_save_error():
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        except SaveError as error:
            self._failure, self._has_reported = error, False
        if self._failure is None:
            _unsettled.discard(self)

    def loss(self, timeout: float) -> str | None:
        """Wait until the last save is whole, as the process ends; return why it is not, if so.

        Args:
          timeout: seconds to wait, if there are other processes.
        """
        if jax.process_count() == 1:
            self._settle()
        else:
            settling = threading.Thread(target=self._settle, daemon=True)
            settling.start()
            settling.join(timeout)
            if settling.is_alive():
                return (
                    f"the checkpoint of step {self._saving} in {self.folder} was not whole "
                    f"{timeout:.0f} s after the end of this process, one of "
                    f"{jax.process_count()}: another one may have ended before"
                )
        return None if self._failure is None else str(self._failure)

    def _make_room(self, number: int) -> None:
        self._remove_leftovers()
        probe = self.folder / f"{number}.probe"
        probe.write_bytes(b"x")
        probe.unlink()

    def _remove_leftovers(self) -> None:
        # Failed writes leave files that take room, and those that die with them add some for a
        # moment. What comes later still is removed the next time.
        if jax.process_index() != 0:
            return
        for _ in range(20):
            leftovers = list(self.folder.glob("*.orbax-checkpoint-tmp*"))
            if not leftovers:
                return
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            time.sleep(0.05)

    @contextlib.contextmanager
    def _failing_as_save_error(self) -> Iterator[None]:
        try:
            with quiet_absl():
                yield
        # Orbax passes on the errors of its storage layer: OSError, ValueError from tensorstore
        # (also for a full disk), RuntimeError from its threads.
        except Exception as error:
            self._has_failed = True
            self._remove_leftovers()
            raise SaveError(self._failure_in_words(error)) from error

    def _failure_in_words(self, error: Exception) -> str:
        number = self._saving
        others = [n for n in self.numbers() if n != number]
        kept = f"the one of step {others[-1]} is whole" if others else "there is no other"
        text = f"the checkpoint of step {number} could not be written to {self.folder}: "
        words = full_disk(error)
        if words is None:
            return f"{text}{root_cause(error)}; {kept}"
        why = f"{words} (it takes over {format_bytes(self._saving_bytes)}, {room(self.folder)})"
        go_on = "save again, or go on from it" if others else "save again"
        return f"{text}{why}\n{kept}; make room, then {go_on}"


@functools.cache
def _watch_the_end() -> None:
    """Have saves finished, or their loss told, when this process ends."""
    before_threads_end(_settle_all)
    before_leaving(_settle_all)
    atexit.register(_end_with_losses)
    os.register_at_fork(after_in_child=_unsettled.clear)  # the parent's saves are not the child's
    # Jupyter kills a kernel that has not ended within 5 s, so a cell waits for its saves.
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if shell is not None:
        shell.events.register("post_run_cell", lambda *_: _settle_all())


def _settle_all(timeout: float = EXIT_TIMEOUT_S) -> None:
    """Finish all saves under way, and print a line for each that is lost.

    Args:
      timeout: seconds to wait for each, if there are other processes.
    """
    if not _ending.acquire(timeout=timeout):  # another thread ends the process, and waits for them
        return
    try:
        for store in list(_unsettled):
            try:
                loss = store.loss(timeout)
            except BaseException as error:  # Ctrl-C too: who is impatient must hear of the loss
                loss = f"the checkpoints in {store.folder} are not finished: {error!r}"
            _unsettled.discard(store)
            if loss is not None:
                _lost.append(loss)
                print("error:", loss.replace("\n", "; "), file=sys.stderr, flush=True)
    finally:
        _ending.release()


def _end_with_losses() -> None:
    """End the process with status 1 if a save is lost. An exception of an exit handler leaves the
    status 0, and the interpreter has no other way to change it."""
    _settle_all()  # no save is left, unless the interpreter did not call it while threads ran
    if _lost:
        leave(1)
