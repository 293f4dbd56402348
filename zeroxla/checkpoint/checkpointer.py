"""`Checkpointer`: saves training states whole or not at all, and opens them on any mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from zeroxla.checkpoint.about import About
from zeroxla.checkpoint.disk_arrays import by_place, replaced_on_disk, to_disk, writer_of
from zeroxla.checkpoint.entries import (
    WIRES,
    Entry,
    entries,
    outer_entries,
    rebuild,
    slashed,
    with_params,
)
from zeroxla.checkpoint.store import Store
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.program.paths import Path as Name
from zeroxla.program.shapes import shapes_of
from zeroxla.step.islands.island import Island
from zeroxla.step.islands.saved_island import OUTER, SavedIsland
from zeroxla.step.state import TrainState, check_is_state
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored state.

    Attributes:
      number: the number of steps taken.
      state: the state, on the mesh that was asked for; what `Island.begin` takes, if an island
        asked.
      position: the position in the data, as it was saved.
    """

    number: int
    state: Any
    position: Any


class Checkpointer:
    """The checkpoints of one run, in a folder that all processes see.

    A checkpoint holds arrays in natural shapes and belongs to no mesh: it opens on more or fewer
    nodes and devices, with other options. It is written into a temporary folder that is renamed
    when all files are on disk, so every listed checkpoint is whole. Every file has a checksum.

    A save that is under way when the interpreter ends is finished first, also after an exception.

    In a run of several processes all must make a `Checkpointer`, and make the same calls.

    Args:
      folder: the folder of the checkpoints; made if missing.
      keep: how many checkpoints to keep. Older ones are deleted when a newer one is whole. None
        keeps all.
      every: `save` does nothing for numbers that are no multiple of it.
      asynchronous: `save` returns as soon as the arrays are off the devices, and files are written
        while training goes on. On CPUs nothing is copied: the step that follows takes new memory.
      report: called with a sentence when a checkpoint could not be written in the background, or
        was passed over because it is damaged. None means `warnings.warn`.

    Raises:
      ValueError: a number is below 1, or the folder cannot be made.

    >>> import tempfile, jax, numpy as np, zeroxla
    >>> from zeroxla.models import MLP
    >>> step = zeroxla.make_step(MLP.tiny(), zeroxla.make_mesh(nodes=1))
    >>> batch = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    >>> state = step.init(jax.random.key(0), batch)
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...     checkpointer.save(1, state)
    ...     checkpointer.restore(step).number
    True
    1
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 3,
        every: int = 1,
        asynchronous: bool = True,
        report: Callable[[str], None] | None = None,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"Checkpointer({name}={value}); give 1 or more")
        self.every, self._report = every, report or _warn
        self._store = Store(
            Path(folder).expanduser().resolve(), keep=keep, asynchronous=asynchronous
        )

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self._store.folder

    def save(
        self,
        number: int,
        state: TrainState | SavedIsland,
        position: Any = None,
        *,
        config: ZeroConfig | None = None,
        force: bool = False,
    ) -> bool:
        """Save a state.

        Args:
          number: the number of steps taken.
          state: the state of a `Step`, or what `Island.to_save` returns. It may be donated as soon
            as this returns.
          position: the position in the data; anything that JSON holds. The first process's counts.
          config: the step's options, for people to read.
          force: save even if `every` does not divide the number.

        Returns:
          Whether it was saved; False also if it was there already.

        Raises:
          ValueError: the number is no whole number of 0 or more, the state is none or was donated
            to a step, or this was closed.
          SaveError: the disk is full or the folder not writable. Earlier checkpoints stay whole.
            A failure in the background is reported by the next call that saves or reads. `wait`
            and `close` raise it, unless another save has begun by then. If none of them is called,
            the process ends with a line about it and status 1.

        Cost: waits for the save before. Then each device copies its shards to its host, except on
        CPUs; with `asynchronous=False` it waits until all is on disk. Host memory: the copy, until
        it is written.
        """
        if self._store.is_closed:
            raise ValueError(
                f"save({number}) after close: this Checkpointer of {self.folder} has ended; make "
                "another one, or close it later"
            )
        number = _number_of_steps(number)
        island = state if isinstance(state, SavedIsland) else SavedIsland(inner=state)
        check_is_state(island.inner, whole=True)
        if number % self.every and not force:
            return False
        self._store.wait_and_report(self._report)
        if number in self.numbers():
            if self._store.damage(number) is None:
                return False
            self._store.delete(number)
        found = entries(island.inner) | outer_entries(island)
        about = About.of(
            number, island.inner, found, position=position, config=config, outer=island.facts
        )
        self._store.save(number, found, about)
        return True

    def wait(self) -> None:
        """Wait until the last save is whole.

        Raises:
          SaveError: it could not be written. It is raised once.
        """
        self._store.wait()

    def numbers(self) -> list[int]:
        """Return the numbers of the steps that have a checkpoint."""
        return self._store.numbers()

    def latest(self) -> int | None:
        """Return the newest step that has an undamaged checkpoint; None if there is none.

        It reports the damaged checkpoints that it passes over.

        Cost: reads the files of each checkpoint that it looks at, once.
        """
        return self._store.latest(self._report)

    def describe(self, number: int | None = None) -> About:
        """Describe a checkpoint without reading its arrays.

        Args:
          number: the number of steps taken. None means the newest checkpoint.

        Raises:
          ValueError: there is none.
        """
        return self._store.about(self._store.listed(number, self._report))

    def restore(
        self,
        like: Step | TrainState | Island,
        number: int | None = None,
        *,
        island_own: bool = False,
    ) -> Restored:
        """Read a state onto a mesh, of any size.

        From an island's checkpoint, a step or a state is given the parameters that all islands
        share, which are evaluated; an `Island` its own, from which it trains on.

        Args:
          like: a step that has seen a batch (`init` or `abstract_state`), or the state's shapes
            with shardings (`Step.abstract_state`), or a state; or an `Island` whose step has seen a
            batch.
          number: the number of steps taken. None means the newest undamaged checkpoint.
          island_own: read an island's own parameters also into a step or a state.

        Raises:
          ValueError: there is no checkpoint, it is damaged, of another model or optimizer, from a
            newer zeroxla, or no island's that has what is asked for.

        Cost: reads all files once to check them; then each device's part is read once more. Host
        memory: the shards, and 256 MiB of arrays on their way, or the largest array if that is
          more.
        """
        number = self._store.whole(number, self._report)
        about = self._store.about(number)
        island = None
        if isinstance(like, Island):
            island, like = like.shapes(), like.step
        shapes = like.shapes() if isinstance(like, Step) else like
        wanted = entries(shapes)
        names: Mapping[Name, Name] = {}
        if island is None:
            names = about.parameters(island_own=island_own)
        elif "numbers" in (about.outer or {}):
            wanted |= outer_entries(island)
        about.check(wanted)
        if any(path != name for path, name in names.items()):  # wires remember the own ones
            wanted = {path: entry for path, entry in wanted.items() if path[0] != WIRES}
        wanted = self._with_wires(about, wanted)
        read = functools.partial(self._read, number, names)
        in_memory, on_disk = by_place(wanted)
        arrays: dict[Name, Any] = {**read(in_memory)}
        if on_disk:
            arrays |= to_disk(read, on_disk, writer_of(like, shapes))
        state: Any = rebuild(shapes, arrays, key=about.key)
        if island is not None:
            outer = {path: x for path, x in arrays.items() if path[0] == OUTER}
            state = SavedIsland(inner=state, arrays=outer or None, facts=about.outer)
        return Restored(number=number, state=state, position=about.position)

    def restore_params(
        self,
        like: TrainState | None = None,
        pattern: str = "",
        number: int | None = None,
        *,
        island_own: bool = False,
    ) -> Any:
        """Read parameters only, or some of them; of an island's checkpoint, those that all islands
        share.

        Args:
          like: a state. The parameters that are read replace its own; the others stay. None returns
            NumPy arrays.
          pattern: a regular expression, searched in paths such as "h/attn/c_attn/kernel".
            Parameters with a match are read.
          number, island_own: as in `restore`.

        Returns:
          The state; or a nested dict of NumPy arrays in natural shapes, float32.

        Raises:
          ValueError: for the reasons of `restore`, or because no parameter matches.
        """
        number = self._store.whole(number, self._report)
        about = self._store.about(number)
        chosen = {
            path
            for path in about.leaves
            if path[0] == "params" and re.search(pattern, slashed(path[1:]))
        }
        if not chosen:
            raise ValueError(
                f"no parameter of the checkpoint of step {number} matches {pattern!r}; they are "
                + ", ".join(slashed(p[1:]) for p in about.leaves if p[0] == "params")
            )
        names = about.parameters(island_own=island_own)
        if like is None:
            shapes = shapes_of({names[path]: about.leaves[path] for path in chosen})
            arrays = self._store.read(number, shapes)
            return traverse_util.unflatten_dict({p: arrays[names[p]] for p in chosen})["params"]
        found = entries(like)
        about.check(found, chosen)
        read = functools.partial(self._read, number, names)
        arrays, on_disk = by_place({path: found[path] for path in chosen})
        # The wire state belongs to other weights.
        new = dataclasses.replace(like, params=with_params(like, read(arrays)), wire_state=None)
        return replaced_on_disk(new, read, on_disk) if on_disk else new

    def close(self) -> None:
        """Wait for the last save, and release threads.

        Raises:
          SaveError: it could not be written.
        """
        self._store.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(
        self, number: int, names: Mapping[Name, Name], wanted: Mapping[Name, Entry]
    ) -> dict[Name, jax.Array]:
        """Read arrays onto a mesh, some of them under other names."""
        stored = {names.get(path, path): entry for path, entry in wanted.items()}
        found = self._store.read_entries(number, stored)
        return {path: found[names.get(path, path)] for path in wanted}

    def _with_wires(self, about: About, wanted: dict[Name, Entry]) -> dict[Name, Entry]:
        """Leave out the wire state unless all of it fits."""
        wires = {path: entry for path, entry in wanted.items() if path[0] == WIRES}
        there = [path for path in about.leaves if path[0] == WIRES]
        if all(about.holds(path, entry) for path, entry in wires.items()):
            return wanted
        if there:
            self._report(
                f"what wires remember in the checkpoint of step {about.number} is of another mesh "
                "or other formats, and starts anew"
            )
        return {path: entry for path, entry in wanted.items() if path[0] != WIRES}


def _number_of_steps(number: Any) -> int:
    """Return a number of steps, of Python, NumPy or JAX, as an int.

    Raises:
      ValueError: it is none.
    """
    found = -1
    if not isinstance(number, bool | np.bool_):
        with contextlib.suppress(TypeError):
            found = operator.index(number)
    if found < 0:
        raise ValueError(
            f"save({number!r}, ...): the number of steps taken is a whole number of 0 or more"
        )
    return found


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
