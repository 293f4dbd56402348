"""`--config FILE`: the options of a command from a TOML or JSON file, as words of a command line.

The words stand before those of the command line, and of a flag that is written twice the last one
holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from zeroxla.cli.errors import UsageError
from zeroxla.cli.option_groups import flag
from zeroxla.cli.option_help import groups_of

FLAG = "--config"


def with_config(arguments: Sequence[str], kind: type[Any]) -> list[str]:
    """Return a command line in which the options of a file take the place of `--config FILE`.

    Args:
      arguments: the words after the command.
      kind: the dataclass of the command's options, in groups.

    Raises:
      UsageError: the file cannot be read, or holds something that is no option.
    """
    rest, files = _taken(arguments)
    if not files:
        return list(arguments)
    if len(files) > 1:
        raise UsageError(f"{FLAG} is given {len(files)} times; write the options into one file")
    file = Path(files[0]).expanduser()
    groups = groups_of(kind)
    options = _flat(_read(file), {n: _names(k) for n, k in groups.items()}, file)
    repeated = {name for group in groups.values() for name in _repeated(group)}
    words: list[str] = []
    for name, value in options.items():
        # A flag that takes one value, and may be repeated, stands before each of them.
        each = value if name in repeated and isinstance(value, list) else [value]
        words += [word for one in each for word in _words(name, one, file)]
    return words + rest


def _taken(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without `--config FILE`, and the files."""
    rest: list[str] = []
    files: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == FLAG:
            file = next(words, None)
            if file is None:
                raise UsageError(f"{FLAG} needs a file; write {FLAG} FILE")
            files.append(file)
        elif word.startswith(f"{FLAG}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, files


def _read(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text()
        values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{FLAG} {file}: {error.strerror}") from error
    except ValueError as error:
        form = "JSON" if file.suffix == ".json" else "TOML (a JSON file ends in .json)"
        raise UsageError(f"{FLAG} {file} is no {form}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{FLAG} {file} holds {values!r}; write an object with options")
    return values


def _flat(values: Mapping[str, Any], groups: Mapping[str, set[str]], file: Path) -> dict[str, Any]:
    """Return the options of a file by name, taken out of their groups."""
    every = set().union(*groups.values())
    found: dict[str, Any] = {}
    for name, value, known in _entries(values, groups, every):
        own = name.replace("-", "_")
        if own not in known:
            raise UsageError(f"{FLAG} {file}: {_unknown(name, own, known, groups)}")
        if own in found:
            raise UsageError(f"{FLAG} {file} has {name} twice; leave one out")
        found[own] = value
    return found


def _entries(
    values: Mapping[str, Any], groups: Mapping[str, set[str]], every: set[str]
) -> Iterator[tuple[str, Any, set[str]]]:
    """Yield each name and value of a file, with the names that may stand in its place."""
    for name, value in values.items():
        if name in groups and isinstance(value, dict):
            yield from ((own, inner, groups[name]) for own, inner in value.items())
        else:
            yield name, value, every


def _unknown(name: str, own: str, known: set[str], groups: Mapping[str, set[str]]) -> str:
    homes = [group for group, names in groups.items() if own in names]
    if homes:
        return f"{name} belongs to [{homes[0]}]; move it there, or above all tables"
    nearest = difflib.get_close_matches(own, (*known, *groups), n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}?" if nearest else "--help lists the options"
    return f"there is no option {name}; {hint}"


def _words(name: str, value: Any, file: Path) -> list[str]:
    """Return the words of a command line for an option."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, list) and all(isinstance(x, str | int | float) for x in value):
        return [flag(name), *map(str, value)]
    if isinstance(value, str | int | float):
        return [f"{flag(name)}={value}"]
    raise UsageError(f"{FLAG} {file}: {name} = {value!r} is no value of an option")


def _repeated(kind: type[Any]) -> set[str]:
    """Return the names of options whose flag may be repeated."""
    hints = typing.get_type_hints(kind, include_extras=True)
    marks = {name: typing.get_args(hint)[1:] for name, hint in hints.items()}
    return {name for name, given in marks.items() if tyro.conf.UseAppendAction in given}


def _names(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}
