"""`About`: the description of a checkpoint in its `about.json`, read without its arrays."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from zeroxla.checkpoint.entries import WIRES, Entry, key_kind, slashed
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.program.paths import Path as Name
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.islands.saved_island import COPY, OUTER
from zeroxla.step.state import TrainState

if TYPE_CHECKING:
    from rich.table import Table

# 2: the bytes of a wire's step lie together. Format 1 without wires is the same.
FORMAT = 2
ABOUT = "about.json"


class DamageError(ValueError):
    """A checkpoint's files are not as they were written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointArray:
    """An array in a checkpoint.

    Attributes:
      name: a path of keys, such as "params/h/attn/c_attn/kernel".
      shape: the natural shape.
      dtype: as NumPy names it.
    """

    name: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class About(Report):
    """The contents of a checkpoint; `print` it, or read its attributes.

    Attributes:
      number: the number of steps taken.
      leaves: every array, by name.
      fingerprint: a hash of the parameters' names, shapes and dtypes; equal for equal models.
      mesh: the axes of the mesh that it was saved from.
      config: the options of the step, if they were given.
      position: the position in the data, as it was given.
      key: the kind of the state's PRNG key.
      outer: an island's rounds, besides arrays; None if it is no island's. With the state of the
        outer optimizer it has "numbers".
      version: the version of zeroxla that wrote it.
      format: the number of the checkpoint format.
    """

    number: int
    leaves: Mapping[tuple[str, ...], CheckpointArray]
    mesh: Mapping[str, int]
    config: Mapping[str, Any] | None
    position: Any
    key: str
    version: str
    format: int = FORMAT
    outer: Mapping[str, Any] | None = None

    @staticmethod
    def of(
        number: int,
        state: TrainState,
        found: Mapping[Name, Entry],
        *,
        position: Any,
        config: ZeroConfig | None,
        outer: Mapping[str, Any] | None = None,
    ) -> About:
        """Describe a state.

        Args:
          number: the number of steps taken.
          state: the state.
          found: its arrays, `entries(state)`.
          position, config: as `Checkpointer.save` takes them.
          outer: `SavedIsland.facts`.
        """
        leaves = {
            path: CheckpointArray(name=path, shape=e.shape, dtype=e.dtype)
            for path, e in found.items()
        }
        return About(
            number=number,
            leaves=leaves,
            mesh=dict(state.step.sharding.mesh.shape),  # type: ignore[union-attr]
            config=None if config is None else _plain(dataclasses.asdict(config)),
            position=position,
            key=key_kind(state.key),
            version=version("zeroxla"),
            outer=outer,
        )

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(self.leaves):
            if path[0] == "params":
                digest.update(f"{slashed(path)} {self.leaves[path]}\n".encode())
        return digest.hexdigest()

    def parameters(self, *, island_own: bool) -> dict[Name, Name]:
        """Return the array that holds each parameter, by the parameter's name: of an island's
        checkpoint the shared one, which is evaluated.

        Args:
          island_own: take the island's own parameters, from which it trains on.

        Raises:
          ValueError: the island's own are asked for, and the checkpoint is no island's; or it holds
            no shared ones.
        """
        names = {path: path for path in self.leaves if path[0] == "params"}
        if self.outer is None and island_own:
            raise ValueError(
                f"the checkpoint of step {self.number} is of no island, so that it has one set of "
                "parameters; leave island_own (--island-own) out"
            )
        if self.outer is None or island_own:
            return names
        shared = {("params", *path[len(COPY) :]): path for path in self.leaves if _is_copy(path)}
        if not shared:
            raise ValueError(
                f"the checkpoint of step {self.number} is of an island, by zeroxla {self.version}, "
                "which kept the parameters that all islands share in the island of the smallest "
                "slot alone; read that one's checkpoint, or this island's own parameters with "
                "island_own=True (--island-own)"
            )
        return names | shared

    def holds(self, path: Name, entry: Entry) -> bool:
        """Say whether an array is there, with the shape and the dtype of a state's."""
        leaf = self.leaves.get(path)
        return leaf is not None and (leaf.shape, leaf.dtype) == (entry.shape, entry.dtype)

    def select(self, pattern: str) -> list[CheckpointArray]:
        """Return the leaves whose name matches a regular expression, whole or in part."""
        return [leaf for path, leaf in self.leaves.items() if re.search(pattern, slashed(path))]

    def write(self, folder: Path) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["leaves"] = [[leaf.name, leaf.shape, leaf.dtype] for leaf in self.leaves.values()]
        values["fingerprint"] = self.fingerprint
        if self.outer is None:  # Earlier versions do not know it.
            del values["outer"]
        (folder / ABOUT).write_text(json.dumps(values, indent=1))

    @staticmethod
    def read(folder: Path) -> About:
        """Read the description of a checkpoint.

        Raises:
          DamageError: it is missing or damaged.
          ValueError: a newer zeroxla wrote it, or an older one whose wires this one cannot read.
        """
        file = folder / ABOUT
        try:
            values = json.loads(file.read_text())
            if values["format"] > FORMAT:
                raise _newer(file, values)
            wires = [slashed(path) for path, _, dtype in values["leaves"] if dtype == "uint8"]
            if values["format"] < 2 and wires:
                raise ValueError(
                    f"{file} is of format 1 and holds arrays of uint8 ({len(wires)}), the first "
                    f"one {wires[0]}. They may be wires, whose layout has changed since; merge "
                    "adapters, or export, "
                    f"with the zeroxla {values.get('version')} that wrote it"
                )
            values.pop("fingerprint")
            leaves = [
                CheckpointArray(name=tuple(path), shape=tuple(shape), dtype=dtype)
                for path, shape, dtype in values.pop("leaves")
            ]
            return About(leaves={leaf.name: leaf for leaf in leaves}, **values)
        except OSError as error:
            raise DamageError(f"{file} cannot be read: {error.strerror}") from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DamageError(f"{file} does not hold what was written ({error})") from error

    def table(self) -> Table:
        """Return the arrays as a rich table."""
        from rich.table import Table

        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        title = f"Checkpoint of step {self.number}, saved from {mesh} by zeroxla {self.version}"
        table = Table(title=title, title_justify="left")
        for column in ("array", "shape", "dtype"):
            table.add_column(column)
        table.add_column("bytes", justify="right")
        for path, leaf in self.leaves.items():
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            table.add_row(slashed(path), shape, leaf.dtype, format_bytes(leaf.num_bytes))
        total = sum(leaf.num_bytes for leaf in self.leaves.values())
        table.add_section()
        table.add_row("total", "", "", format_bytes(total))
        return table

    def check(self, found: Mapping[Name, Entry], chosen: Collection[Name] | None = None) -> None:
        """Check that the checkpoint holds the arrays of a state.

        Args:
          found: the state's arrays.
          chosen: the names to check. None means all but those of the wire state, and those of outer
            parameters that are not asked for.

        Raises:
          ValueError: with the first that differs.
        """
        if chosen is None:
            chosen = {path for path in (*self.leaves, *found) if path[0] not in (WIRES, OUTER)}
            chosen |= {path for path in found if path[0] == OUTER}
        # Parameters first: where they differ, so do an optimizer's copies of them.
        for path in sorted(chosen, key=lambda path: (path[0] != "params", path)):
            there, entry = self.leaves.get(path), found.get(path)
            here = entry and CheckpointArray(name=path, shape=entry.shape, dtype=entry.dtype)
            if there != here:
                what = "optimizer" if path[0] == "opt_state" else "model"
                raise ValueError(
                    f"the checkpoint of step {self.number} is of another {what}: its "
                    f"{slashed(path)} is {there or 'missing'}, and here it is {here or 'missing'}; "
                    f"build the same {what}, or restore the parameters that fit with restore_params"
                )


def _is_copy(path: Name) -> bool:
    return path[: len(COPY)] == COPY


def _newer(file: Path, values: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"{file} is of format {values['format']}, written by zeroxla {values.get('version')}; this "
        f"one reads formats up to {FORMAT}: install a newer zeroxla"
    )


def _plain(value: Any) -> Any:
    """Return an option as a value that JSON can hold."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
