"""Whether this process is part of an island, and of which one."""

from __future__ import annotations

import os

from zeroxla.cli.errors import UsageError
from zeroxla.mesh.processes.environment import ISLANDS, SLOT, island_of


def in_island() -> bool:
    """Return whether this process was started as a part of an island."""
    return bool(os.environ.get(ISLANDS))


def slot_here() -> int | None:
    """Return the slot of this process' island; None if it is part of none.

    Raises:
      UsageError: it is part of one without a slot.
    """
    if not in_island():
        return None
    try:
        _, _, slot = island_of(None, "", None)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if slot is None:
        raise UsageError(
            f"the island's run folder and its part of the data follow from its number, and {SLOT} "
            "is not set; start it with zeroxla island --join HOST:PORT --slot 0 -- ..., each with "
            "another number"
        )
    return slot


def check_islands(outer: str, islands: int | None) -> None:
    """Check that a process trains as an island exactly if its options say how islands exchange.

    Args:
      outer: the option --outer.
      islands: the option --islands.

    Raises:
      UsageError: it does not; with the remedy.
    """
    if in_island() and outer == "none":
        raise UsageError(
            f"this process is part of an island ({ISLANDS}={os.environ[ISLANDS]}), and --outer is "
            f"none, so it would exchange nothing; give --outer streaming, or unset {ISLANDS}"
        )
    if islands is not None and outer == "none":
        raise UsageError(
            f"--islands {islands} without --outer: islands would exchange nothing; give --outer "
            "streaming, or --outer diloco"
        )
    if outer != "none" and not in_island() and islands is None:
        raise UsageError(
            f"--outer {outer}: there are no islands; give --islands 2 for two on this machine, or "
            "run it inside zeroxla island --join HOST:PORT --slot 0 -- ..., beside zeroxla "
            "coordinate"
        )
