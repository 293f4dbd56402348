"""`Checkpointer`: saves training states whole or not at all, and opens them on any mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

import zeroxla
from zeroxla.checkpoint import logical
from zeroxla.checkpoint.about import About, DamageError
from zeroxla.checkpoint.handler import RestoreState, SaveState, StateHandler
from zeroxla.checkpoint.logical import WIRES, Entry, entries, rebuild
from zeroxla.checkpoint.sums import find_damage
from zeroxla.config import ZeroConfig
from zeroxla.hosts.exchange import exchange
from zeroxla.state import TrainState
from zeroxla.step import Step

STATE = "state"


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What was read.

    Attributes:
      number: steps taken.
      state: on the mesh that was asked for.
      position: of the data, as it was saved.
    """

    number: int
    state: TrainState
    position: Any


class Checkpointer:
    """The checkpoints of one run, in a folder that all processes see.

    A checkpoint holds arrays in natural shapes, of no mesh: it opens on more or fewer nodes and
    devices, with other options. It is written into a temporary folder that is renamed when all is
    on disk; what is listed is whole. Every file has a checksum.

    Of several processes all must make it, and make the same calls.

    Args:
      folder: made if missing.
      keep: how many to keep; older ones are deleted when a newer one is whole. None: all.
      every: `save` does nothing for other numbers than the multiples of it.
      asynchronous: `save` returns as soon as the arrays are off the devices, and files are written
        while training goes on. On CPUs nothing is copied: the step that follows takes new memory.
      report: called with a sentence when a checkpoint could not be written in the background, or
        was passed over because it is damaged; `warnings.warn` if None.

    Raises:
      ValueError: a number is below 1, or the folder cannot be made.

    >>> import tempfile, jax, numpy as np, zeroxla
    >>> from models import MLP
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
        self.folder, self.every = Path(folder).expanduser().resolve(), every
        self._report = report or _warn
        self._saving: int | None = None  # or saved last
        self._good: dict[int, str | None] = {}  # what was found wrong with a checkpoint, if checked
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                # Named here, so that the metadata can be read before anything was saved.
                item_handlers={STATE: StateHandler()},
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep, enable_async_checkpointing=asynchronous, create=True
                ),
            )
        except OSError as error:
            raise ValueError(
                f"cannot make the folder of checkpoints {self.folder}: {error.strerror}; correct "
                "the path or its permissions"
            ) from error

    def save(
        self,
        number: int,
        state: TrainState,
        position: Any = None,
        *,
        config: ZeroConfig | None = None,
        force: bool = False,
    ) -> bool:
        """Save a state.

        Args:
          number: steps taken.
          state: that of `Step`; it may be donated as soon as this returns.
          position: of the data; anything that JSON holds. Of several processes that of the first.
          config: the step's, for people to read.
          force: also if `every` does not divide the number.

        Returns:
          Whether it was saved; False too if it was there already.

        Raises:
          SaveError: the disk is full or the folder not writable. Earlier checkpoints stay whole.
            What fails in the background is reported by the next call instead, and raised by `wait`.

        Cost: waits for the save before. Then the copy of a shard from each device to its host, or
        none on CPUs; with `asynchronous=False` until all is on disk. Host memory: the copy, until
        it is written.
        """
        if number % self.every and not force:
            return False
        try:
            self.wait()
        except SaveError as error:
            self._report(str(error))
        if number in self._manager.all_steps():
            if self._good.get(number) is None:
                return False
            self._manager.delete(number)  # found damaged
        self._remove_leftovers()
        found = entries(state)
        about = About.of(
            number,
            found,
            mesh=_mesh_of(state),
            config=None if config is None else _plain(dataclasses.asdict(config)),
            position=position,
            version=zeroxla.__version__,
        )
        arrays = SaveState({p: e for p, e in found.items() if e.array.size}, about)
        self._saving = number
        with self._failing_as_save_error():
            self._manager.save(number, args=ocp.args.Composite(**{STATE: arrays}), force=True)
        self._good[number] = None
        return True

    def wait(self) -> None:
        """Wait until the last save is whole.

        Raises:
          SaveError: it could not be written.
        """
        with self._failing_as_save_error():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def numbers(self) -> list[int]:
        """Return the steps of which there is a checkpoint."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Return the newest step of which there is an undamaged checkpoint; None if there is none.

        What it passes over it reports.

        Cost: reads the files of those that it looks at, once.
        """
        self.wait()
        for number in reversed(self.numbers()):
            damage = self._damage(number)
            if damage is None:
                return number
            self._report(
                f"the checkpoint of step {number} is damaged: {damage}; the one before it is taken"
            )
        return None

    def describe(self, number: int | None = None) -> About:
        """Return what is in a checkpoint, without reading its arrays.

        Args:
          number: steps taken; the newest if None.

        Raises:
          ValueError: there is none.
        """
        return About.read(self._folder_of(self._listed(number)))

    def restore(self, like: Step | TrainState, number: int | None = None) -> Restored:
        """Read a state onto a mesh, of any size.

        Args:
          like: a step that has seen a batch (`init` or `abstract_state`), or the state's shapes
            with shardings (`Step.abstract_state`), or a state.
          number: steps taken; the newest undamaged one if None.

        Raises:
          ValueError: there is no checkpoint, it is damaged, of another model or optimizer, or from
            a newer zeroxla.

        Cost: reads all files once to check them, and once more each device its part. Host memory:
        the shards, and what is on its way: 0.25 GB, or the largest leaf if that is more.
        """
        shapes = like.shapes() if isinstance(like, Step) else like
        number = self._whole(number)
        about = About.read(self._folder_of(number))
        wanted = entries(shapes)
        about.check(wanted)
        if any(p[0] == WIRES and not _fits(about, p, e) for p, e in wanted.items()):
            if shapes.wire_state is not None and WIRES in {p[0] for p in about.leaves}:
                self._report(
                    f"what wires remember in the checkpoint of step {number} is of another mesh or "
                    "other formats, and starts anew"
                )
            wanted = {p: e for p, e in wanted.items() if p[0] != WIRES}
        arrays = self._read(number, wanted)
        return Restored(number=number, state=rebuild(shapes, arrays), position=about.position)

    def restore_params(
        self, like: TrainState | None = None, pattern: str = "", number: int | None = None
    ) -> Any:
        """Read parameters only, or some of them.

        Args:
          like: a state; the parameters that are read replace its own, the others stay. None:
            return NumPy arrays.
          pattern: a regular expression; those are read whose path, such as "h/attn/c_attn/kernel",
            it matches in whole or in part.
          number: as in `restore`.

        Returns:
          The state; or a nested dict of NumPy arrays in natural shapes, float32.

        Raises:
          ValueError: as in `restore`; or no parameter matches.
        """
        number = self._whole(number)
        about = About.read(self._folder_of(number))
        chosen = {
            path
            for path in about.leaves
            if path[0] == "params" and re.search(pattern, logical.name(path[1:]))
        }
        if not chosen:
            raise ValueError(
                f"no parameter of the checkpoint of step {number} matches {pattern!r}; they are "
                + ", ".join(logical.name(p[1:]) for p in about.leaves if p[0] == "params")
            )
        if like is None:
            shapes = {
                path: jax.ShapeDtypeStruct(about.leaves[path].shape, about.leaves[path].dtype)
                for path in chosen
            }
            return traverse_util.unflatten_dict(self._arrays(number, shapes))["params"]
        found = entries(like)
        about.check(found, chosen)
        arrays = self._read(number, {path: found[path] for path in chosen})
        rest = {path: entry.array for path, entry in found.items() if path not in chosen}
        state = rebuild(like, rest | arrays)
        return dataclasses.replace(state, wire_state=None)  # it was of other weights

    def close(self) -> None:
        """Wait for the last save, and release threads.

        Raises:
          SaveError: it could not be written.
        """
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # has been raised above
                self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ reading

    def _listed(self, number: int | None) -> int:
        self.wait()
        numbers = self.numbers()
        if number in numbers:
            return number
        if number is None and numbers:
            return numbers[-1]
        there = ", ".join(map(str, numbers)) or "none"
        raise ValueError(
            f"{self.folder} holds no complete checkpoint"
            + ("" if number is None else f" of step {number}")
            + f" ({there}); start the run anew, or name another folder"
        )

    def _whole(self, number: int | None) -> int:
        """Return the number of a checkpoint that is not damaged."""
        listed = self._listed(number)
        if number is None:
            found = self.latest()
            if found is None:
                damage = self._damage(listed)
                raise ValueError(f"every checkpoint in {self.folder} is damaged: {damage}")
            return found
        if damage := self._damage(listed):
            raise ValueError(
                f"the checkpoint of step {number} is damaged: {damage}; restore another one: "
                + ", ".join(str(n) for n in self.numbers() if n != number)
            )
        return listed

    def _damage(self, number: int) -> str | None:
        """Return what is wrong with a checkpoint; each process looks at its part of the files."""
        if number not in self._good:
            part, parts = jax.process_index(), jax.process_count()
            damage = find_damage(self._folder_of(number), part=part, parts=parts)
            said = exchange(f"checkpoint of step {number}", damage or "")
            self._good[number] = next(filter(None, said), None)
        return self._good[number]

    def _read(self, number: int, wanted: dict[logical.Path, Entry]) -> dict[logical.Path, Any]:
        """Read arrays as they are stored on a mesh."""
        targets = {
            path: jax.ShapeDtypeStruct(
                e.array.shape, e.array.dtype, sharding=e.array.sharding
            )
            for path, e in wanted.items()
            if e.array.size
        }
        without = {path: logical.empty(e) for path, e in wanted.items() if not e.array.size}
        return without | self._arrays(number, targets)

    def _arrays(
        self, number: int, targets: dict[logical.Path, jax.ShapeDtypeStruct]
    ) -> dict[logical.Path, Any]:
        with _quiet_absl():
            read = ocp.args.Composite(**{STATE: RestoreState(targets)})
            return self._manager.restore(number, args=read)[STATE]

    def _folder_of(self, number: int) -> Path:
        return self.folder / str(number) / STATE

    # ------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def _failing_as_save_error(self) -> Iterator[None]:
        try:
            with _quiet_absl():
                yield
        # Orbax passes on what its storage layer raises: OSError, ValueError for tensorstore's
        # errors (a full disk among them), RuntimeError from its threads.
        except Exception as error:
            number = self._saving
            self._remove_leftovers()
            kept = self.numbers()
            raise SaveError(
                f"the checkpoint of step {number} could not be written to {self.folder}: "
                f"{_root_cause(error)}; "
                + (f"the one of step {kept[-1]} is whole" if kept else "there is no other")
            ) from error

    def _remove_leftovers(self) -> None:
        # Of writes that failed: they hold space. What a dying write adds later goes the next time.
        if jax.process_index() == 0:
            for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    # Orbax logs a failed write's traceback once per thread it passes through; the one error that
    # is raised says it all.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    # tensorstore appends a dump of its whole specification.
    return str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _mesh_of(state: TrainState) -> dict[str, int]:
    return dict(state.step.sharding.mesh.shape)


def _fits(about: About, path: logical.Path, entry: Entry) -> bool:
    leaf = about.leaves.get(path)
    return leaf is not None and (leaf.shape, leaf.dtype) == (entry.shape, entry.dtype)


def _plain(value: Any) -> Any:
    """Return what JSON can hold of an option."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
