"""Names the option that a misspelt keyword was meant for."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

Options = TypeVar("Options", bound=type)


def check_keywords(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check the keywords of a call.

    Raises:
      TypeError: one is unknown.
    """
    for keyword in given:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, n=1, cutoff=0.0)
            raise TypeError(
                f"{name} has no option {keyword!r}; did you mean {near[0]!r}? All of them: "
                f"help(zeroxla.{name})"
            )


def names_options(options: Options) -> Options:
    """Let a dataclass of options name the field that a misspelt keyword was meant for."""
    make: Any = options.__init__
    known = [field.name for field in dataclasses.fields(options)]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        check_keywords(options.__name__, given, known)
        make(self, *args, **given)

    options.__init__ = init
    return options
