"""`CatchUp`: fetches what an island has missed, before it trains and beside training."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping, Sequence

import jax

from zeroxla.config.outer import Outer
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.step.islands.crew import Crew
from zeroxla.step.islands.handover import (
    INNER,
    Fetch,
    inner_arrays,
    shared_arrays,
    with_inner,
    with_shared,
)
from zeroxla.step.islands.local_rows import checksum, checksum_of
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.islands.outer_state import IslandState


class CatchUp:
    """Takes outer parameters from islands that train.

    What the island has changed by itself is kept: its parameters move by as much as the outer ones
    do, and its difference counts in the next round.

    Args:
      membership: joins this process to the others.
      crew: the processes of the island.
      outer: how islands exchange.
      programs: the programs of each fragment.
    """

    def __init__(
        self,
        membership: Membership,
        crew: Crew,
        outer: Outer,
        programs: Sequence[OuterPrograms],
    ) -> None:
        self._membership, self._crew = membership, crew
        self._outer, self._programs = outer, programs
        self._fetches: dict[int, Fetch] = {}
        self._absent: dict[int, int] = {}
        self._bases: dict[int, jax.Array] = {}
        self._turn = 0

    def all(self, state: IslandState, absent: Mapping[int, int]) -> IslandState:
        """Fetch all that is missing, and wait for it.

        Args:
          state: the state.
          absent: versions of fragments that the parameters have gone on from, and whose outer
            parameters are not in the state. If those that come have the same version, the island
            has its own difference from them.
        """
        self._absent = dict(absent)
        num = len(state.versions)
        inner = None
        if int(state.inner.step) == 0 and any(self.lacks(state, p) for p in range(num)):
            inner = self._ask_inner(state)
        while missing := self._crew.common({str(p) for p in range(num) if self.lacks(state, p)}):
            fetches = {int(p): self._ask(state, int(p)) for p in missing}
            for fetch in fetches.values():
                fetch.wait()
            arrived = set().union(*(self._arrived(p, fetch) for p, fetch in fetches.items()))
            for name in self._crew.common(arrived):
                state = self.deal(state, name)
        if inner is not None:
            state = self._with_inner(state, inner)
        round = self._membership.view.round
        if round > state.round:
            clock = self._outer.start_of(round - 1)
            state = dataclasses.replace(state, round=round, clock=clock)
        return state

    def rebase(self, fragment: int, copy: jax.Array) -> None:
        """Say that what the island has changed until it had these parameters has counted.

        Args:
          fragment: the fragment.
          copy: the parameters, float32 [devices, size].
        """
        self._bases[fragment] = copy

    def lacks(self, state: IslandState, fragment: int) -> bool:
        """Return whether others have merged a round of a fragment that this island has not, or
        other bits."""
        view = self._membership.view
        if not view.versions:  # The coordinator has forgotten the run, and waits for islands.
            return False
        return view.versions[fragment] > state.versions[fragment] or fragment in view.astray

    def names(self, state: IslandState, busy: Collection[int]) -> set[str]:
        """Start to fetch what is missing; return what has come, as "adopt fragment version".

        Args:
          state: the state.
          busy: fragments whose exchange is under way.
        """
        found: set[str] = set()
        for fragment in range(len(state.versions)):
            if fragment in busy:
                continue
            fetch = self._fetches.get(fragment)
            if not self.lacks(state, fragment):
                self._fetches.pop(fragment, None)
            elif fetch is None or self._is_useless(fragment, fetch):
                self._fetches[fragment] = self._ask(state, fragment)
            else:
                found |= self._arrived(fragment, fetch)
        return found

    def deal(self, state: IslandState, name: str) -> IslandState:
        """Take what has come, by its name."""
        _, number, version = name.split()
        fragment = int(number)
        fetch, programs = self._fetches.pop(fragment), self._programs[fragment]
        assert fetch.arrays is not None
        mine = state.outer[fragment]
        other = with_shared(mine, fetch.arrays)
        leaves = jax.tree.leaves(state.inner.params)
        own = {i: leaves[i] for i in programs.fragment.leaves}
        if self._absent.pop(fragment, -1) == int(version):
            bits = checksum_of(other.copy)  # The parameters have gone on from it.
        else:
            known = self._bases.pop(fragment, mine.copy)
            changed, sums = programs.adopt(own, other.copy, known)
            state, bits = state.with_leaves(changed), checksum(sums)
        state = state.with_version(fragment, int(version))
        state = state.with_fragment(fragment, copy=other.copy, opt_state=other.opt_state)
        self._membership.note("checksums", fragment, (int(version), bits))
        self._membership.tell(versions=state.versions)
        return state

    def _ask(self, state: IslandState, fragment: int) -> Fetch:
        """Ask for a fragment."""
        self._turn += 1
        least = self._membership.view.versions[fragment]
        living = self._membership.view.living
        donors = [place for place in living if place.versions[fragment] >= least]
        like = shared_arrays(state.outer[fragment])
        what = f"fragment/{fragment}"
        fetch = Fetch(self._membership, what, least, like, donors, self._turn)
        self._fetches[fragment] = fetch
        return fetch

    def _is_useless(self, fragment: int, fetch: Fetch) -> bool:
        """Return whether a question must be asked again."""
        newest = self._membership.view.versions[fragment]
        return fetch.has_ended and (fetch.version is None or fetch.version < newest)

    def _arrived(self, fragment: int, fetch: Fetch) -> set[str]:
        """Return the name of what has come, if it has."""
        if fetch.has_ended and fetch.error is not None:
            raise fetch.error
        there = fetch.has_ended and fetch.version is not None
        return {f"adopt {fragment} {fetch.version}"} if there else set()

    def _ask_inner(self, state: IslandState) -> Fetch:
        """Ask for another island's optimizer state and model state."""
        if any(isinstance(x, DiskArray) for x in jax.tree.leaves(state.inner)):
            warnings.warn(
                "this island comes without a checkpoint, and its optimizer's state is on disk: it "
                "begins from zero, since only arrays in memory are taken from other islands; begin "
                "with a checkpoint to keep it",
                stacklevel=2,
            )
        self._turn += 1
        living, like = self._membership.view.living, inner_arrays(state.inner)
        return Fetch(self._membership, INNER, 0, like, living, self._turn)

    def _with_inner(self, state: IslandState, fetch: Fetch) -> IslandState:
        """Return the state with another island's optimizer state and model state."""
        while True:
            fetch.wait()
            if fetch.error is not None:
                raise fetch.error
            if self._crew.common({"there"} if fetch.arrays is not None else set()):
                assert fetch.arrays is not None
                return dataclasses.replace(state, inner=with_inner(state.inner, fetch.arrays))
            fetch = self._ask_inner(state)
