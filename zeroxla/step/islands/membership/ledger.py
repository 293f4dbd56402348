"""`Ledger`: what the coordinator must not forget. It is a file, written anew for each round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroxla.step.islands.membership.messages import Closed, Position, closed_of

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The state of the coordinator.

    Attributes:
      facts: what all islands have in common; empty before the first one has begun.
      started: whether the run has begun.
      lives: how often the coordinator was started.
      round: the number of the open round.
      versions: for each fragment, the number after that of its last closed round.
      closed: the last closed round of each fragment.
      positions: how far the data of each slot has been trained on.
      counted: for each slot, the version of the last round of each fragment in which it counted.
    """

    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    started: bool = False
    lives: int = 0
    round: int = 0
    versions: tuple[int, ...] = ()
    closed: Mapping[int, Closed] = dataclasses.field(default_factory=dict)
    positions: Mapping[int, Position] = dataclasses.field(default_factory=dict)
    counted: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file; after a failure the one of before is still there.

        Raises:
          OSError: it could not be written.
        """
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(draft, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @staticmethod
    def load(path: Path) -> Ledger:
        """Return what the file says; a new ledger if there is none.

        Raises:
          ValueError: the file cannot be read, or is not one of a coordinator.
        """
        try:
            found: Any = json.loads(path.read_text())
        except FileNotFoundError:
            return Ledger()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as a coordinator's state ({error}); name another file to "
                "begin anew: islands that are there go on from what they have"
            ) from error
        try:
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']}, and this version reads {_FORMAT}")
            return Ledger(
                facts=found["facts"],
                started=bool(found["started"]),
                lives=int(found["lives"]),
                round=int(found["round"]),
                versions=tuple(map(int, found["versions"])),
                closed={int(k): closed_of(v) for k, v in found["closed"].items()},
                positions={int(k): Position(**v) for k, v in found["positions"].items()},
                counted={int(k): tuple(map(int, v)) for k, v in found["counted"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not the state of a coordinator: {error!r}") from error
