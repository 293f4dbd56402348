"""The checkpoints in a folder as Orbax's `CheckpointManager` keeps them: whole or not there."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroxla.checkpoint.about import About
from zeroxla.checkpoint.checksums import find_damage
from zeroxla.checkpoint.entries import Entry
from zeroxla.checkpoint.errors import SaveError, quiet_absl, root_cause
from zeroxla.checkpoint.orbax_handler import SAVE_TIMEOUT_S, RestoreState, SaveState, StateHandler
from zeroxla.mesh.processes.exchange import exchange, on_first
from zeroxla.program.paths import Path as Name

STATE = "state"

_saves = itertools.count()  # all processes make the same ones


class Store:
    """Numbered states in a folder; of several processes all make the same calls.

    Args:
      folder: made if missing.
      keep: how many; None for all.
      asynchronous: whether `save` leaves the writing to a thread.

    Raises:
      ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int | None, asynchronous: bool) -> None:
        self.folder = folder
        self._saving: int | None = None  # or saved last
        self._failure: SaveError | None = None  # of the last save, until it is raised
        self._has_reported = False  # that failure
        self._damage: dict[int, str | None] = {}  # of those that were looked at
        try:
            self._manager = ocp.CheckpointManager(
                folder,
                # Named here, so that the metadata can be read before anything was saved.
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
        """Return the numbers that are there, ascending."""
        return sorted(self._manager.all_steps())

    def folder_of(self, number: int) -> Path:
        return self.folder / str(number) / STATE

    def save(self, number: int, found: Mapping[Name, Entry], about: About) -> None:
        """Write a state. A failure before, which the caller has reported, is not raised any more.

        Raises:
          SaveError: it could not be written.
        """
        self._failure = None
        stored = {path: entry for path, entry in found.items() if entry.array.size}
        arrays = SaveState(stored, about, name=f"save {next(_saves)}")
        self._saving = number
        with self._failing_as_save_error():
            on_first("folder of checkpoints", lambda: self._make_room(number))
            self._manager.save(number, args=ocp.args.Composite(**{STATE: arrays}), force=True)
        self._damage[number] = None

    def wait(self) -> None:
        """Wait until the last save is whole.

        Raises:
          SaveError: it could not be written; only once.
        """
        self._settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_and_report(self, report: Callable[[str], None]) -> None:
        """Wait until the last save is whole; report, once, that it could not be written: `wait`
        still raises it."""
        self._settle()
        if self._failure is not None and not self._has_reported:
            self._has_reported = True
            report(str(self._failure))

    def read(self, number: int, targets: Mapping[Name, jax.ShapeDtypeStruct]) -> dict[Name, Any]:
        """Read arrays: onto the shardings of the targets, padded with zeros up to their shapes."""
        with quiet_absl():
            read = ocp.args.Composite(**{STATE: RestoreState(targets)})
            return self._manager.restore(number, args=read)[STATE]

    def damage(self, number: int) -> str | None:
        """Return what is wrong with a checkpoint, in words; None if nothing is.

        Cost: the first time, reads its files, each process some of them.
        """
        if number not in self._damage:
            part, parts = jax.process_index(), jax.process_count()
            found = find_damage(self.folder_of(number), part=part, parts=parts)
            said = exchange(f"checkpoint of step {number}", found or "")
            self._damage[number] = next(filter(None, said), None)
        return self._damage[number]

    def about(self, number: int) -> About:
        """Return what a checkpoint says of itself."""
        return About.read(self.folder_of(number))

    def listed(self, number: int | None, report: Callable[[str], None]) -> int:
        """Return the number if it is there; the newest if None. Report a save that failed.

        Raises:
          ValueError: it is not, or nothing is.
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
        """Return the newest that is not damaged; None if there is none. Report what is damaged, and
        a save that failed."""
        self.wait_and_report(report)
        for number in reversed(self.numbers()):
            damage = self.damage(number)
            if damage is None:
                return number
            report(f"the checkpoint of step {number} is damaged and passed over: {damage}")
        return None

    def whole(self, number: int | None, report: Callable[[str], None]) -> int:
        """Return the number if it is there and not damaged; as `latest` if None.

        Raises:
          ValueError: it is not.
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
        """Wait, and release threads.

        Raises:
          SaveError: the last save could not be written.
        """
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # has been raised above
                self._manager.close()

    def _settle(self) -> None:
        """Wait until the last save has ended, and remember if it failed."""
        try:
            with self._failing_as_save_error():
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        except SaveError as error:
            self._failure, self._has_reported = error, False

    def _make_room(self, number: int) -> None:
        self._remove_leftovers()
        probe = self.folder / f"{number}.probe"
        probe.write_bytes(b"x")
        probe.unlink()

    def _remove_leftovers(self) -> None:
        # Of writes that failed: they hold space. What a dying write adds later goes the next time.
        if jax.process_index() == 0:
            for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)

    @contextlib.contextmanager
    def _failing_as_save_error(self) -> Iterator[None]:
        try:
            with quiet_absl():
                yield
        # Orbax passes on what its storage layer raises: OSError, ValueError for tensorstore's
        # errors (a full disk among them), RuntimeError from its threads.
        except Exception as error:
            number = self._saving
            self._remove_leftovers()
            kept = [n for n in self.numbers() if n != number]
            raise SaveError(
                f"the checkpoint of step {number} could not be written to {self.folder}: "
                f"{root_cause(error)}; "
                + (f"the one of step {kept[-1]} is whole" if kept else "there is no other")
            ) from error
