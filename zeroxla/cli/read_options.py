"""Options of a command line, read by tyro into a command's dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

_T = TypeVar("_T")


def read_options(
    command: str, arguments: Sequence[str], kind: type[_T], default: _T | None = None
) -> _T:
    """Return the options that a command line gives; a wrong one ends the program with status 2.

    Args:
      command: the command's name, for help and errors.
      arguments: the words after the command.
      kind: the dataclass of the command's options; its docstrings are the help.
      default: values of the options that the command line leaves out. None means the defaults of
        `kind`.
    """
    # The options' groups order the help; as prefixes of every flag they would be noise.
    options: _T = tyro.cli(
        kind,
        args=list(arguments),
        prog=f"zeroxla {command}",
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
    )  # pyright: ignore[reportAssignmentType]
    return options
