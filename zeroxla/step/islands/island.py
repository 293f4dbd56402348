"""`Island`: trains by itself, and exchanges fragments of its parameters with other islands."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from zeroxla.mesh.processes.environment import island_of
from zeroxla.mesh.processes.exchange import exchange
from zeroxla.step.islands.catch_up import CatchUp
from zeroxla.step.islands.common_facts import facts_of
from zeroxla.step.islands.crew import Crew
from zeroxla.step.islands.exchange import Exchange, Mean
from zeroxla.step.islands.fragments import cut_fragments
from zeroxla.step.islands.handover import Answers
from zeroxla.step.islands.local_rows import checksum, checksum_of
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.messages import Position
from zeroxla.step.islands.outer_programs import Leaves, OuterPrograms
from zeroxla.step.islands.outer_state import IslandState
from zeroxla.step.state import TrainState, state_shardings
from zeroxla.step.step import Step

_POLL_S = 0.05


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
        self._answers = Answers(self._membership)
        self._pending: dict[int, Exchange] = {}
        self._num_rows, self._num_batches = 0, 0
        self._rows_at: dict[int, int] = {}  # by fragment, when it was exchanged last
        self._step_s, self._stepped_at = 0.0, time.monotonic()

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the run. The others go on without this island."""
        self._membership.close()

    def init(self, key: jax.Array, batch: Any) -> IslandState:
        """Make the state, as `step.init` does; all islands pass the same key.

        Raises:
          ValueError, TimeoutError: as `begin` does.
        """
        return self.begin(self.step.init(key, batch))

    def begin(self, state: TrainState | IslandState) -> IslandState:
        """Return the state that this island begins from, when all are there.

        Args:
          state: a training state, from which the outer parameters begin; or an island's state that
            was saved. If the run is further, the island takes the outer parameters from another
            one, and with a training state that has taken no step its optimizer's state as well.

        Raises:
          ValueError: another island has another model, other options, another mesh or other
            parameters.
          TimeoutError: the other islands did not come.
        """
        if isinstance(state, TrainState):
            outer = tuple(p.begin(_leaves_of(state, p)) for p in self.programs)
            state = IslandState(inner=state, outer=outer, versions=(0,) * len(outer))
        facts = facts_of(state, self.step)
        sums = {
            p: (v, checksum_of(f.copy))
            for p, (v, f) in enumerate(zip(state.versions, state.outer, strict=True))
        }
        said = {"versions": state.versions, "round": state.round, "checksums": sums}
        self._membership.begin(facts=facts, **said)
        self._catch_up = CatchUp(self._membership, self._crew, self.outer, self.programs)
        state = self._catch_up.all(state)
        self._membership.tell(trains=True, versions=state.versions, round=state.round)
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
        inner, metrics = self.step(state.inner, batch)
        state = dataclasses.replace(state, inner=inner, clock=state.clock + 1)
        self._num_rows += jax.tree.leaves(batch)[0].shape[0]
        self._num_batches += 1
        now = time.monotonic()
        self._step_s, self._stepped_at = now - self._stepped_at, now
        state, told = self._meet(state, lambda pending: pending.due)
        view = self._membership.view
        pairs = zip(view.versions, state.versions, strict=True)
        return state, {
            **metrics,
            "islands": len(view.living),
            "coordinator": self._membership.is_connected,
            "rounds_behind": sum(max(0, there - here) for there, here in pairs),
            **told,
        }

    def settle(self, state: IslandState) -> IslandState:
        """Wait for the exchanges under way, and merge them; catch up with the other islands."""
        state, until = self._meet(state, _now)[0], time.monotonic()
        until += self._membership.view.deadline
        while self._crew.common({"behind"} if self._is_behind(state, until) else set()):
            time.sleep(_POLL_S)
            state, _ = self._meet(state, _now)
        return state

    def _meet(
        self, state: IslandState, due_of: Callable[[Exchange], int]
    ) -> tuple[IslandState, dict[str, Any]]:
        """Deal with what has happened, and wait for the exchanges that are due.

        Args:
          state: the state.
          due_of: returns the clock at which an exchange is waited for.
        """
        told: dict[str, Any] = {}
        if not self._is_time(state):
            return state, told
        began = time.monotonic()
        while True:
            names = self._crew.common(self._names(state, due_of, began))
            for name in names:
                state, found = self._deal(state, name)
                told |= found
            late = [x for x in self._pending.values() if state.clock >= due_of(x)]
            if not names and (not late or self._crew.common({"alone"} & self._alone(began))):
                self._membership.tell(
                    versions=state.versions,
                    round=min(self._pending, default=state.round),
                    position=Position(
                        batches=self.position.batches + self._num_batches,
                        rows=self.position.rows + self._num_rows,
                    ),
                )
                return state, told
            if not names:
                late[0].wait(_POLL_S)

    def _is_time(self, state: IslandState) -> bool:
        """Return whether the processes of the island look now what has happened: an island of one
        process after each step, others when something is due, and a few times in between."""
        if jax.process_count() == 1:
            return True
        dues = [x.due for x in self._pending.values()]
        stride = max(1, self.outer.every // self.outer.fragments // 10)
        at = min([*dues, self.outer.start_of(state.round)])
        return state.clock >= at or state.clock % stride == 0

    def _alone(self, began: float) -> set[str]:
        """Return "alone" if the island goes on without waiting for an exchange."""
        patience = self._membership.view.deadline
        lost = not self._membership.is_connected and time.monotonic() > began + patience
        return {"alone"} if lost or self._membership.is_closed else set()

    def _is_behind(self, state: IslandState, until: float) -> bool:
        """Return whether there is something to catch up, and somebody who has it."""
        lacks = any(self._catch_up.lacks(state, p) for p in range(len(state.versions)))
        others = any(place.slot != self.slot for place in self._membership.view.living)
        there = self._membership.is_connected and others and not self._membership.is_closed
        return lacks and there and time.monotonic() < until

    def _names(
        self, state: IslandState, due_of: Callable[[Exchange], int], began: float
    ) -> set[str]:
        """Return what has happened in this process, as "what number" each."""
        found = set()
        for number, pending in self._pending.items():
            if pending.has_ended:
                if pending.error is not None:
                    raise pending.error
                if pending.mean is None:
                    found.add(f"drop {number}")
                elif state.clock >= due_of(pending):
                    found.add(f"merge {number}")
        view, number = self._membership.view, state.round
        fragment = number % self.outer.fragments
        busy = {n % self.outer.fragments for n in self._pending}
        if self._membership.is_connected and view.round > number:
            found.add(f"skip {view.round}")
        elif fragment not in busy and not self._catch_up.lacks(state, fragment):
            closes_in = self._membership.closes_in if view.round == number else None
            hurry = closes_in is not None and closes_in < 2 * self._step_s
            if state.clock >= self.outer.start_of(number) or hurry:
                found.add(f"start {number}")
        found |= self._catch_up.names(state, busy)
        return found | {f"answer {name}" for name in self._answers.names(state)}

    def _deal(self, state: IslandState, name: str) -> tuple[IslandState, dict[str, Any]]:
        """Deal with one thing that has happened in all processes of the island."""
        what, _, rest = name.partition(" ")
        match what:
            case "merge":
                return self._merge(state, int(rest))
            case "drop":
                self._pending.pop(int(rest))
            case "start":
                return self._start(state, int(rest)), {}
            case "skip":
                clock = max(state.clock, self.outer.start_of(int(rest) - 1))
                return dataclasses.replace(state, round=int(rest), clock=clock), {}
            case "answer":
                self._answers.answer(rest, state)
            case _:
                return self._catch_up.deal(state, name), {}
        return state, {}

    def _start(self, state: IslandState, number: int) -> IslandState:
        """Take part in a round. Its clock is the islands' clock from now on."""
        fragment, clock = number % self.outer.fragments, self.outer.start_of(number)
        programs, mine = self.programs[fragment], state.outer[fragment]
        self._pending[number] = Exchange(
            number,
            programs,
            self._membership,
            programs.difference(_leaves_of(state.inner, programs), mine.copy),
            mine,
            num_rows=self._num_rows - self._rows_at.get(fragment, 0),
            due=clock + self.outer.delay,
        )
        return dataclasses.replace(state, round=number + 1, clock=clock)

    def _merge(self, state: IslandState, number: int) -> tuple[IslandState, dict[str, Any]]:
        """Merge the result of an exchange."""
        pending, fragment = self._pending.pop(number), number % self.outer.fragments
        programs, mine, found = self.programs[fragment], state.outer[fragment], pending.mean
        assert isinstance(found, Mean)
        own = _leaves_of(state.inner, programs)
        changed, copy, opt_state, bits = programs.merge(own, found.mean, mine.copy, mine.opt_state)
        version = state.versions[fragment] + 1
        state = state.with_leaves(changed).with_version(fragment, version)
        state = state.with_fragment(
            fragment,
            copy=copy,
            opt_state=opt_state,
            error=found.error,
            mean_error=found.mean_error,
        )
        self._rows_at[fragment] = self._rows_at.get(fragment, 0) + pending.num_rows
        self._membership.note("checksums", fragment, (version, checksum(bits)))
        oldest = min(self._pending, default=number + 1)
        self._membership.post.forget(functools.partial(_is_before, oldest))
        return state, {
            "outer_bytes": found.num_bytes,
            "outer_s": found.seconds,
            "outer_islands": found.num_islands,
        }

    @functools.cached_property
    def programs(self) -> tuple[OuterPrograms, ...]:
        """The programs of each fragment; the step must have seen a batch.

        Raises:
          ValueError: it has seen none, or there are more fragments than elements.
        """
        shapes, mesh = self.step.shapes(), self.step.mesh
        shardings = jax.tree.leaves(state_shardings(shapes, mesh).params)
        layout = self.step.programs.layout_of(shapes.params, shapes.placements[0])
        leaves = zip(layout.leaves, shardings, jax.tree.leaves(shapes.params), strict=True)
        own = [None if leaf.frozen else s.shard_shape(x.shape) for leaf, s, x in leaves]
        return tuple(
            OuterPrograms(
                outer=self.outer,
                mesh=mesh,
                shardings={i: shardings[i] for i in fragment.leaves},
                fragment=fragment,
            )
            for fragment in cut_fragments(own, self.outer.fragments)
        )


def _leaves_of(state: TrainState, programs: OuterPrograms) -> Leaves:
    """Return the leaves of a fragment."""
    leaves = jax.tree.leaves(state.params)
    return {i: leaves[i] for i in programs.fragment.leaves}


def _now(pending: Exchange) -> int:
    """Return the clock at which an exchange is waited for if nothing comes after it."""
    return 0


def _is_before(round: int, name: str) -> bool:
    """Return whether a name is one of an exchange of an earlier round."""
    number, _, _ = name.partition("/")
    return number.isdecimal() and int(number) < round
