"""All cases of the gauntlet."""

from __future__ import annotations

import importlib

from gauntlet_parts.case import Case

MODULES = (
    "transformers_models",
    "package_models",
    "pair_models",
    "own_models",
    "public_ways",
    "linen_layers",
    "nnx_layers",
)


def all_cases() -> list[Case]:
    """Return every case, in the order of the table."""
    found = [
        case
        for name in MODULES
        for case in importlib.import_module(f"gauntlet_parts.{name}").cases()
    ]
    assert len({case.name for case in found}) == len(found)
    return found


def case_named(name: str) -> Case:
    """Return a case.

    Raises:
      ValueError: there is none of this name.
    """
    for case in all_cases():
        if case.name == name:
            return case
    raise ValueError(f"no case is named {name!r}; `gauntlet.py --list` prints the names")
