"""`AsIsland`: how `zeroxla train` trains as an island among others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zeroxla.checkpoint.checkpointer import Checkpointer, Restored
from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.island import LARGEST_SLOT
from zeroxla.step.islands.island import Island
from zeroxla.step.islands.outer_state import IslandState
from zeroxla.step.islands.saved_island import SavedIsland
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class AsIsland:
    """Takes a run's steps as an island.

    Args:
      step: the run's step.
      slot: the number of the island.
      warn: prints a warning.

    Attributes:
      slot: the number of the island.
    """

    def __init__(self, step: Step, slot: int, warn: Callable[[str], None]) -> None:
        self.slot = slot
        self._step, self._warn = step, warn
        self._island: Island | None = None
        self._is_led = True

    def join(self) -> Island:
        """Join the others, if that has not been done.

        Raises:
          UsageError: the coordinator refuses the island, or does not answer.
        """
        if self._island is None:
            try:
                self._island = Island(self._step, slot=self.slot)
            except (ValueError, TimeoutError) as error:
                raise UsageError(str(error)) from error
        return self._island

    def begin(
        self, state: TrainState | SavedIsland, batches: Any, batch: int, *, resumed: bool
    ) -> IslandState:
        """Begin with the others, where this island's data goes on.

        Args:
          state: a new state, or a checkpoint's.
          batches: the iterator over the island's part of the data. A resumed run's is where the
            checkpoint was; a new one is moved past the batches that the slot has had.
          batch: the rows of a batch.
          resumed: whether the state is a checkpoint's.

        Raises:
          UsageError: as `join`; or the island differs from the others, or they do not come.
        """
        island = self.join()
        if resumed:
            taken = num_taken(batches)
            island.position = dataclasses.replace(
                island.position, batches=taken, rows=taken * batch
            )
        else:
            move_to(batches, island.position.batches)
        try:
            return island.begin(state)
        except (ValueError, TimeoutError) as error:
            raise UsageError(str(error)) from error

    def restore(self, checkpoints: Checkpointer) -> Restored:
        """Read the newest checkpoint; its state is one that `begin` takes."""
        return checkpoints.restore(self.join())

    def to_save(self, state: IslandState, *, settle: bool) -> tuple[IslandState, SavedIsland]:
        """Return a state, and what a checkpoint keeps of it.

        Args:
          state: the state.
          settle: whether to wait first for the exchanges under way, which no checkpoint keeps.
        """
        state = self.settle(state) if settle else state
        return state, self.join().to_save(state)

    def step(self, state: IslandState, batch: Any) -> tuple[IslandState, dict[str, Any]]:
        """Take a step; warn when the coordinator is lost, and when it is back."""
        state, metrics = self.join()(state, batch)
        if metrics["coordinator"] != self._is_led:
            self._is_led = metrics["coordinator"]
            self._warn(
                "the islands' coordinator is there again"
                if self._is_led
                else "the islands' coordinator is out of reach; this island trains on by itself, "
                "and exchanges again when it is back"
            )
        return state, metrics

    def settle(self, state: IslandState) -> IslandState:
        """Wait for the exchanges under way, and merge them."""
        return self.join().settle(state)

    def shared(self, state: IslandState) -> TrainState:
        """Return the training state with the parameters that all islands share."""
        return self.join().shared(state)

    def close(self) -> None:
        """Leave the others, who go on."""
        if self._island is not None:
            self._island.close()


def inner_of(state: TrainState | IslandState | SavedIsland) -> TrainState:
    """Return the training state, which evaluation takes."""
    return state if isinstance(state, TrainState) else state.inner


def steps_of(state: TrainState | IslandState) -> int:
    """Return the number of steps that the optimizer of a state has taken. An island that comes
    later has the optimizer of another one."""
    return int(jax.device_get(inner_of(state).step))


def status_of(values: Mapping[str, Any]) -> str:
    """Return the text beside the progress bar about a step's islands; "" if there are none."""
    if "islands" not in values:
        return ""
    behind = f", {values['rounds_behind']} rounds behind" if values["rounds_behind"] else ""
    lost = "" if values["coordinator"] else ", no coordinator"
    return f", {values['islands']} islands{behind}{lost}"


def seed_of(seed: int, slot: int) -> int:
    """Return the seed of the order in which an island draws its data. Slot 0 has the run's own.

    Args:
      seed: the run's seed, of 32 bits.
      slot: the number of the island.

    Raises:
      ValueError: the slot does not fit beside the seed.
    """
    if not 0 <= slot <= LARGEST_SLOT:
        raise ValueError(f"slot {slot} of an island; take one between 0 and {LARGEST_SLOT}")
    return seed + (slot << 32)


def num_taken(batches: Any) -> int:
    """Return the number of batches that have been taken from an iterator of grain."""
    return batches.get_state()["next_index"]


def move_to(batches: Any, number: int) -> None:
    """Let an iterator of grain go on after `number` batches."""
    batches.set_state({**batches.get_state(), "next_index": number})
