"""`Island`: trains by itself, and exchanges fragments of its parameters with other islands."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from zeroxla.mesh.processes.environment import island_of
from zeroxla.mesh.processes.exchange import exchange
from zeroxla.step.islands.common_facts import facts_of
from zeroxla.step.islands.crew import Crew
from zeroxla.step.islands.exchange_bytes import ExchangeBytes
from zeroxla.step.islands.local_rows import checksum_of
from zeroxla.step.islands.make_programs import begin, programs_of
from zeroxla.step.islands.meetings import Meetings
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.messages import Position
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.islands.outer_state import IslandState
from zeroxla.step.islands.saved_island import SavedIsland, form_of, opened, saved
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class Island:
    """Takes training steps, and exchanges with other islands what they have changed.

    All islands have the same model, the same options and meshes of the same shape. Call it like a
    step, with an `IslandState`; `init` makes it. An island that is late, or comes later, takes what
    it has missed from one that trains. Without the coordinator it trains on by itself.

    Args:
      step: the training step; `outer` of its config says how islands exchange.
      address: the coordinator's, "host:port"; see `Coordinator`. None reads ZEROXLA_ISLANDS, which
        `zeroxla launch --islands` and `zeroxla island` set.
      token: the secret that all islands share with it. None reads ZEROXLA_ISLANDS_TOKEN, or the
        file that ZEROXLA_ISLANDS_TOKEN_FILE names.
      slot: the number of this island, and of its part of the data. None reads ZEROXLA_SLOT; without
        it the island takes the first one that is free, which is its own if it comes back.
      host: the address at which other islands reach this process. None takes the one that the
        coordinator sees.
      timeout: seconds to wait for the coordinator, and for the other islands before the first step.

    Attributes:
      slot: the number of this island.
      position: how many batches of the slot have been trained on, and their rows, when it joined.

    Raises:
      ValueError: the config has no `outer`, a part of the parameters lives on disk, or the
        coordinator refuses the island.
      TimeoutError: the coordinator was not to be reached, or has another token.
    """

    def __init__(
        self,
        step: Step,
        address: str | None = None,
        token: str | None = None,
        *,
        slot: int | None = None,
        host: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        if step.config.outer is None:
            raise ValueError(
                "the step's config does not say how islands exchange; pass to make_step "
                "config=ZeroConfig.diloco(), ZeroConfig.streaming() or ZeroConfig(outer=Outer())"
            )
        if step.config.offload.params == "disk":
            raise ValueError(
                "an island exchanges parameters from memory; take Offload(params=None or "
                '"host") instead of "disk"'
            )
        self.step, self.outer = step, step.config.outer
        address, token, slot = island_of(address, token, slot)
        self._crew, process = Crew(), jax.process_index()
        join = functools.partial(
            Membership,
            address,
            token,
            process=process,
            num_processes=jax.process_count(),
            host=host,
            timeout=timeout,
        )
        if process == 0:  # The others learn from it which island they are.
            self._membership = join(slot=slot)
            exchange("island", str(self._membership.view.slot))
        else:
            self._membership = join(slot=int(exchange("island", "")[0]))
        self.slot, self.position = self._membership.view.slot, self._membership.view.position
        self._num_batches, self._stepped_at = 0, time.monotonic()
        self._is_refused = False

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def exchange(self) -> str | None:
        """The name of the exchange under way in which this island takes part; None outside."""
        view = self._membership.view
        mine = any(place.slot == self.slot for place in view.roster)
        return view.attempt if view.attempt and mine else None

    def close(self) -> None:
        """Leave the run. The others go on without this island."""
        self._membership.close()

    def init(self, key: jax.Array, batch: Any) -> IslandState:
        """Make the state, as `step.init` does; all islands pass the same key.

        Raises:
          ValueError, TimeoutError: as `begin` does.
        """
        return self.begin(self.step.init(key, batch))

    def begin(self, state: TrainState | SavedIsland) -> IslandState:
        """Return the state that this island begins from, when all are there.

        Args:
          state: a training state, from which the outer parameters begin; or what a checkpoint of an
            island has. If the run is further, the island takes the outer parameters from another
            one, and with a training state that has taken no step its optimizer's state as well.

        Raises:
          ValueError: another island has another model, other options, another mesh or other
            parameters.
          TimeoutError: the other islands did not come.
        """
        if isinstance(state, SavedIsland) and state.arrays is not None:
            return self._begin(opened(state, self.programs), {})
        facts: Mapping[str, Any] = {"versions": (), "round": 0, "clock": 0}
        if isinstance(state, SavedIsland):
            facts, state = state.facts or facts, state.inner
        outer = begin(self.programs, state.params)
        found = IslandState(
            inner=state,
            outer=outer,
            versions=(0,) * len(outer),
            round=facts["round"],
            clock=facts["clock"],
        )
        return self._begin(found, dict(enumerate(facts["versions"])))

    def _begin(self, state: IslandState, absent: Mapping[int, int]) -> IslandState:
        """Join the others with a state.

        Args:
          state: the state.
          absent: the versions of outer parameters that another island has saved.
        """
        facts = facts_of(state, self.step)
        sums = {
            p: (v, checksum_of(f.copy))
            for p, (v, f) in enumerate(zip(state.versions, state.outer, strict=True))
        }
        said = {"versions": state.versions, "round": state.round, "checksums": sums}
        self._membership.begin(facts=facts, **said)
        numbered = dataclasses.replace(self.outer, fragments=len(self.programs))
        meetings = Meetings(self._membership, self._crew, numbered, self.programs)
        meetings.is_late = self._membership.view.round > state.round
        state = meetings.catch_up.all(state, absent)
        self._membership.tell(versions=state.versions, round=state.round)
        self._meetings = meetings
        self._stepped_at = time.monotonic()
        return state

    def __call__(self, state: IslandState, batch: Any) -> tuple[IslandState, dict[str, Any]]:
        """Take a step; then start the exchange and merge the results that are due.

        Args:
          state: the state, which is donated.
          batch: this island's rows.

        Returns:
          The next state, and the step's metrics, with `islands`, how many train; `coordinator`,
          whether it is there; `rounds_behind`, the rounds that this island has to catch up. After a
          step that merged an exchange also `outer_bytes`, what this process has sent in it;
          `outer_s`, the seconds that it took; `outer_islands`, how many took part.
        """
        inner, metrics = self.step.take(state.inner, batch)
        state = dataclasses.replace(state, inner=inner, clock=state.clock + 1)
        meetings, now = self._meetings, time.monotonic()
        # A pause between two calls is no step, and takes no more than twice as long as one here.
        took, self._stepped_at = now - self._stepped_at, now
        meetings.step_s = min(took, 2 * meetings.step_s or took)
        meetings.num_rows += jax.tree.leaves(batch)[0].shape[0]
        self._num_batches += 1
        if self._num_batches == 1:  # From now on others wait for this island.
            self._membership.tell(trains=True)
        self._membership.prepare(
            position=Position(
                batches=self.position.batches + self._num_batches,
                rows=self.position.rows + meetings.num_rows,
            )
        )
        state, told = meetings.meet(state, settle=False)
        view = self._membership.view
        if view.refused and not self._is_refused:
            warnings.warn(
                f"the coordinator refuses this island, which trains on by itself: {view.refused}",
                stacklevel=2,
            )
        self._is_refused = bool(view.refused)
        pairs = zip(view.versions, state.versions, strict=False)  # None before a run has begun
        return state, {
            **metrics,
            "islands": len({self.slot, *(place.slot for place in view.living)}),
            "coordinator": self._membership.is_connected,
            "rounds_behind": sum(max(0, there - here) for there, here in pairs),
            **told,
        }

    def settle(self, state: IslandState) -> IslandState:
        """Wait for the exchanges under way, merge them, and catch up with the other islands.

        It waits for four of the coordinator's deadlines at most; what comes later is merged after a
        later step.
        """
        return self._meetings.settle(state)

    def describe(self, num: int | None = None) -> ExchangeBytes:
        """Return the table of fragments: when each is exchanged, and the bytes that it takes.

        Args:
          num: the number of islands. None takes those that train now.

        Raises:
          ValueError: the step has seen no batch.
        """
        living = {self.slot, *(place.slot for place in self._membership.view.living)}
        return ExchangeBytes.of(self.programs, len(living) if num is None else num)

    def to_save(self, state: IslandState) -> SavedIsland:
        """Return what `Checkpointer.save` takes. Exchanges under way are not in it: `settle` first.

        Each island saves the outer parameters, which all of them share. The outer optimizer's state
        is saved by one of them: the one with the smallest slot of those that train.
        """
        living = self._membership.view.living if self._membership.is_connected else ()
        is_first = all(place.slot >= self.slot for place in living)
        saves_all = bool(self._crew.common({"saves"} if is_first else set()))
        return saved(state, self.programs, optimizer=saves_all)

    def shared(self, state: IslandState) -> TrainState:
        """Return the training state with the outer parameters, which all islands share, in the
        place of this island's own: the model to evaluate and to export.

        Cost: a second copy of the parameters.
        """
        for programs, fragment in zip(self.programs, state.outer, strict=True):
            leaves = programs.leaves_of(state.inner.params)
            state = state.with_leaves(programs.replaced(leaves, fragment.copy))
        return state.inner

    def shapes(self) -> SavedIsland:
        """Return the shapes of what can be saved; the step must have seen a batch.

        Raises:
          ValueError: it has seen none.
        """
        return form_of(self.step.shapes(), self.programs)

    @functools.cached_property
    def programs(self) -> tuple[OuterPrograms, ...]:
        """The programs of each fragment; the step must have seen a batch.

        Raises:
          ValueError: it has seen none, or there are more fragments than elements or steps.
        """
        return programs_of(self.step)
