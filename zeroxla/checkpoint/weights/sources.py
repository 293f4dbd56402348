"""Sources of exported parameters, read one leaf at a time: a training state, or a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from zeroxla.checkpoint.about import ABOUT, About
from zeroxla.checkpoint.checksums import find_damage
from zeroxla.checkpoint.orbax_handler import open_array
from zeroxla.checkpoint.store import STATE
from zeroxla.checkpoint.weights.leaf_in_files import LeafInFiles
from zeroxla.checkpoint.weights.tensor_names import Shape, shapes_of
from zeroxla.frontend.lora.checks import check_adapted
from zeroxla.frontend.lora.leaf_plan import BASE, LORA, Adapter, LoraPlan
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.state import TrainState, host_leaf


class WeightSource(Protocol):
    """Parameters by path.

    Attributes:
      title: their name in messages.
      shapes: the natural shape of each parameter.
      is_collective: whether all processes must read a leaf for one to have it.
    """

    title: str
    shapes: Mapping[Path, Shape]
    is_collective: bool

    def read(self, path: Path) -> np.ndarray:
        """Return a leaf in its natural shape, float32."""
        ...


class StateSource:
    """The parameters of a training state."""

    def __init__(self, state: TrainState) -> None:
        self.title, self.is_collective = "the state", True
        leaves = paths_of(state.params)
        pairs = zip(leaves, state.placements[0], strict=True)
        self._leaves = {path: (x, placement) for (path, x), placement in pairs}
        self.shapes: Mapping[Path, Shape] = {
            path: placement.shape for path, (_, placement) in self._leaves.items()
        }

    def read(self, path: Path) -> np.ndarray:
        return host_leaf(*self._leaves[path])


class CheckpointSource:
    """The parameters of a checkpoint, read without a mesh.

    Args:
      folder: the folder of one checkpoint, or of several, whose newest is taken.
      island_own: take an island's own parameters instead of those that all islands share.

    Raises:
      ValueError: it holds no checkpoint, the checkpoint is damaged, or is no island's that has what
        is asked for.

    Cost: reads the files once, to check them.
    """

    def __init__(self, folder: str | FilePath, *, island_own: bool = False) -> None:
        self._folder = _state_folder(FilePath(folder).expanduser().resolve())
        self.title, self.is_collective = f"the checkpoint {self._folder.parent}", False
        if damage := find_damage(self._folder):
            raise ValueError(f"{self.title} is damaged: {damage}; name the folder of another one")
        about = About.read(self._folder)
        self._names = {
            path[1:]: name for path, name in about.parameters(island_own=island_own).items()
        }
        self.shapes: Mapping[Path, Shape] = {
            path: about.leaves[name].shape for path, name in self._names.items()
        }

    def read(self, path: Path) -> np.ndarray:
        if 0 in self.shapes[path]:  # the storage does not hold these
            return np.zeros(self.shapes[path], np.float32)
        return np.asarray(open_array(self._folder, self._names[path]).read().result())


@dataclasses.dataclass(kw_only=True, slots=True)
class Change:
    """The difference between weights and those that they are compared with.

    Attributes:
      largest: the largest absolute difference.
      total, magnitude: the sums of absolute differences, and of the magnitudes compared with.
      count: the number of elements.
    """

    largest: float = 0.0
    total: float = 0.0
    magnitude: float = 0.0
    count: int = 0

    def add(self, found: np.ndarray, want: np.ndarray) -> None:
        """Count a leaf."""
        difference = np.abs(found - want)
        self.largest = max(self.largest, float(difference.max(initial=0)))
        self.total += float(difference.sum(dtype=np.float64))
        self.magnitude += float(np.abs(want).sum(dtype=np.float64))
        self.count += found.size

    @property
    def words(self) -> str:
        """The differences in words."""
        mean, magnitude = self.total / self.count, self.magnitude / self.count
        return (
            f"by at most {self.largest:.3g}, and {mean:.3g} on average (their mean magnitude is "
            f"{magnitude:.3g})"
        )


class MergedSource:
    """The parameters of a model with its adapters merged into them.

    Args:
      source: parameters of base and adapters.
      plan: the model's plan of leaves and adapters.
      original: leaves of the base before they were stored in 8 or 4 bits; None if that is unknown.

    Attributes:
      change: what merging onto leaves in 8 or 4 bits has changed in those that were read.

    Raises:
      ValueError: the source belongs to another model, or has no adapters.
    """

    def __init__(
        self,
        source: WeightSource,
        plan: LoraPlan,
        original: Mapping[Path, LeafInFiles] | None = None,
    ) -> None:
        check_adapted(plan, source.shapes, source.title)
        self.title, self.is_collective = source.title, source.is_collective
        self._source, self._plan, self._original = source, plan, original
        self.change = Change()
        self.shapes: Mapping[Path, Shape] = shapes_of(plan.shapes)

    def read(self, path: Path) -> np.ndarray:
        adapter = None
        if path in self._plan.targets:
            names = self._plan.adapter_shapes(path)
            adapter = Adapter(**{name: self._source.read((LORA, *path, name)) for name in names})
        stored = self._source.read((BASE, *path))
        merged = np.asarray(self._plan.merged(path, stored, adapter))
        if self._plan.format(path) is not None:
            want = self._plan.floats(path, stored)
            if self._original is not None:
                leaf = self._original[path]
                whole = leaf[tuple(slice(0, n) for n in leaf.shape)]
                want = self._plan.with_adapter(path, jnp.asarray(whole), adapter)
            self.change.add(merged, np.asarray(want))
        return merged


def open_source(source: TrainState | str | FilePath, *, island_own: bool = False) -> WeightSource:
    """Return the source of parameters.

    Args:
      source: a state, or the folder of a checkpoint.
      island_own: as of `CheckpointSource`.

    Raises:
      ValueError: it is neither a state nor a folder with a checkpoint; or for the reasons of
        `CheckpointSource`.
    """
    if isinstance(source, TrainState):
        if island_own:
            raise ValueError(
                "island_own=True chooses between the parameters in an island's checkpoint, and "
                "this is a state; export island.shared(state), or the island's own, state.inner"
            )
        return StateSource(source)
    if isinstance(source, str | FilePath):
        return CheckpointSource(source, island_own=island_own)
    raise ValueError(
        f"cannot export a {type(source).__name__}; give a TrainState, or the folder of a checkpoint"
    )


def _state_folder(folder: FilePath) -> FilePath:
    """Return the folder with the arrays of a checkpoint."""
    for one in (folder, folder / STATE):
        if (one / ABOUT).is_file():
            return one
    numbers = [
        int(inner.name)
        for inner in (folder.iterdir() if folder.is_dir() else ())
        if inner.name.isdecimal() and (inner / STATE / ABOUT).is_file()
    ]
    if not numbers:
        raise ValueError(
            f"{folder} holds no checkpoint; give the folder of a Checkpointer, or that of one of "
            "its steps"
        )
    return folder / str(max(numbers)) / STATE
