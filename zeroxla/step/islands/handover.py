"""What an island that was away takes from one that trains, and how the other one answers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import struct
import threading
from collections.abc import Sequence

import jax

from zeroxla.step.islands.local_rows import from_bytes, to_bytes
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.messages import Place
from zeroxla.step.islands.membership.post import ASK, Question
from zeroxla.step.islands.outer_state import FragmentState, IslandState
from zeroxla.step.state import TrainState

INNER = "inner"
_NOBODY_S = 0.2
_VERSION = struct.Struct(">Q")


def shared_arrays(fragment: FragmentState) -> list[jax.Array]:
    """Return the arrays of a fragment that are the same on all islands."""
    return jax.tree.leaves((fragment.copy, fragment.opt_state))


def with_shared(fragment: FragmentState, arrays: Sequence[jax.Array]) -> FragmentState:
    """Return a fragment with other shared arrays."""
    tree = jax.tree.structure((fragment.copy, fragment.opt_state))
    copy, opt_state = tree.unflatten(arrays)
    return dataclasses.replace(fragment, copy=copy, opt_state=opt_state)


def inner_arrays(state: TrainState) -> list[jax.Array]:
    """Return the arrays of a training state that a new island takes from another: all but the
    parameters, which it has from the outer ones, and what lies on disk."""
    rest = dataclasses.replace(state, params=None)
    return [x for x in jax.tree.leaves(rest) if isinstance(x, jax.Array)]


def with_inner(state: TrainState, arrays: Sequence[jax.Array]) -> TrainState:
    """Return a training state with other arrays of `inner_arrays`."""
    rest = iter(arrays)
    leaves, tree = jax.tree.flatten(dataclasses.replace(state, params=None))
    leaves = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
    return dataclasses.replace(tree.unflatten(leaves), params=state.params)


class Fetch:
    """Asks another island for something, once; it runs in a thread from the start.

    Args:
      membership: joins this process to the others.
      what: what it asks for, "fragment/3" or INNER.
      version: the least version of it.
      like: the arrays that it is like.
      donors: the islands that may be asked.
      turn: a number that no other question of this island has, the same in all its processes.

    Attributes:
      version, arrays: what has come; None if nothing has.
    """

    def __init__(
        self,
        membership: Membership,
        what: str,
        version: int,
        like: Sequence[jax.Array],
        donors: Sequence[Place],
        turn: int,
    ) -> None:
        self.version: int | None = None
        self.arrays: list[jax.Array] | None = None
        self.error: BaseException | None = None
        self._membership, self._like, self._turn = membership, list(like), turn
        self._donors = [place for place in donors if place.slot != membership.report.slot]
        self._name = f"{what}/{version}/{membership.report.slot}.{turn}"
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="zeroxla-fetch").start()

    @property
    def has_ended(self) -> bool:
        """Whether it is there."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it is there."""
        self._ended.wait()

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:  # The island's main thread raises it.
            self.error = error
        self._ended.set()
        self._membership.wake()

    def _ask(self) -> None:
        """Ask one island."""
        membership, report = self._membership, self._membership.report
        if not self._donors:
            membership.wait_for(lambda: membership.is_closed, _NOBODY_S)
            return
        at = (self._turn + (report.slot or 0)) % len(self._donors)
        donor = self._donors[at].addresses[report.process]
        patience, place = membership.view.deadline, f"{report.port} {report.host or ''}".strip()
        try:
            membership.post.send(donor, ASK + self._name, place.encode(), timeout=patience)
            body = membership.post.take(
                donor.member, self._name, timeout=patience, is_over=lambda: membership.is_closed
            )
            if body is None:
                return
            (version,) = _VERSION.unpack(body[: _VERSION.size])
            self.arrays = from_bytes(body[_VERSION.size :], self._like)
            self.version = version
        except (OSError, ValueError, struct.error):
            return  # Another one is asked next.


class Answers:
    """Answers the questions of other islands, between steps."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._open: dict[str, Question] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(2, "zeroxla-answer")

    def names(self, state: IslandState) -> set[str]:
        """Return the names of the questions that can be answered."""
        questions = self._membership.post.questions
        while not questions.empty():
            question = questions.get()
            self._open[question.name] = question
        return {name for name in list(self._open) if self._version(name, state) is not None}

    def answer(self, name: str, state: IslandState) -> None:
        """Answer a question. What the state has is copied now, and sent in a thread."""
        question, version = self._open.pop(name), self._version(name, state)
        assert version is not None
        what = name.split("/")
        if what[0] == INNER:
            arrays = inner_arrays(state.inner)
        else:
            arrays = shared_arrays(state.outer[int(what[1])])
        body = _VERSION.pack(version) + to_bytes(arrays)
        patience = self._membership.view.deadline
        # A lost asker asks again, or has no need any more.
        self._pool.submit(self._membership.post.send, question.asker, name, body, timeout=patience)

    def _version(self, name: str, state: IslandState) -> int | None:
        """Return the version of what a question asks for; None if it is not there yet."""
        match name.split("/"):
            case [kind, _, _] if kind == INNER:
                return 0
            case ["fragment", fragment, least, _] if fragment.isdecimal() and least.isdecimal():
                if int(fragment) < len(state.versions):
                    have = state.versions[int(fragment)]
                    return have if have >= int(least) else None
        self._open.pop(name, None)  # It makes no sense, whoever asks.
        return None
