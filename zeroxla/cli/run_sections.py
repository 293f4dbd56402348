"""The sections of a run's config.json, each checked when it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from zeroxla.cli.option_groups import OptionGroups
from zeroxla.cli.run_folder import CONFIG, read_config

_Options = TypeVar("_Options", bound=OptionGroups)


def read_section(run: Path, name: str, *inner: str) -> Mapping[str, Any]:
    """Return a section of a run's config.json.

    Args:
      run: the run's folder.
      name: the section's name.
      *inner: the names of a section in it, of a section in that, and so on.

    Raises:
      ValueError: the folder holds no run, or the section is missing or no section.
    """
    found: Any = read_config(run)
    for depth, key in enumerate(names := (name, *inner)):
        found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            where = ".".join(names[: depth + 1])
            raise ValueError(
                f"{run / CONFIG} lacks the section {where!r}; restore the file as the run wrote "
                "it, or start a new run"
            )
    return found


def stored_options(kind: type[_Options], run: Path, name: str = "options") -> _Options:
    """Return the options in a section of a run's config.json.

    Args:
      kind: the class of the options.
      run: the run's folder.
      name: the section.

    Raises:
      ValueError: the section, or the section of a group of options in it, is missing; or another
        version of zeroxla wrote them.
    """
    section = read_section(run, name)
    for group in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        if group.name in section or group.name not in kind.younger_groups:
            read_section(run, name, group.name)
    return kind.from_dict(section)
