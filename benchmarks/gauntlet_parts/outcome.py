"""The outcome of a check: passed, refused with a reason, failed, or not applicable."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zeroxla

OK, REFUSED, FAILED, NOT_APPLICABLE = "ok", "refused", "failed", "not applicable"

_LIBRARY = Path(zeroxla.__file__).parent
_NOT_LIBRARY = ("models",)  # Flax models, linked into the package.


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a check.

    Attributes:
      status: OK, REFUSED, FAILED or NOT_APPLICABLE.
      detail: the measured error, or the reason.
      where: for a failure, the last lines of its traceback.
    """

    status: str
    detail: str = ""
    where: str = ""


class Wrong(Exception):
    """A result differs from the reference's; the text says how."""


def outcome_of(check: Callable[[], str]) -> Outcome:
    """Run a check, which returns its detail, and say what became of it.

    A refusal is a ValueError or a NotImplementedError that zeroxla's own code raises, with a
    sentence. Any other exception is a failure, also the ones that go through zeroxla from JAX, Flax
    or the model.
    """
    try:
        return Outcome(OK, check())
    except NotApplicable as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except Wrong as error:
        return Outcome(FAILED, f"wrong result: {error}")
    except Exception as error:
        if is_refusal(error):
            return Outcome(REFUSED, one_line(str(error), 600))
        text = f"{type(error).__name__}: {one_line(str(error), 600)}"
        return Outcome(FAILED, text, last_frames(error))


class NotApplicable(Exception):
    """The check makes no sense for this model; the text says why."""


def is_refusal(error: BaseException) -> bool:
    """Say whether zeroxla itself raised the error, for the user to read."""
    if not isinstance(error, ValueError | NotImplementedError) or len(str(error).split()) < 5:
        return False
    if type(error) not in (ValueError, NotImplementedError) and not _is_ours(
        getattr(type(error), "__module__", "")
    ):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and in_library(frames[-1].filename)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "zeroxla"


def in_library(filename: str) -> bool:
    """Say whether a file is zeroxla's own code."""
    try:
        inside = Path(os.path.abspath(filename)).relative_to(_LIBRARY)
    except ValueError:
        return False
    return inside.parts[0] not in _NOT_LIBRARY


def last_frames(error: BaseException, count: int = 3) -> str:
    """Return the last frames of zeroxla, and the last ones of all, without the machine's paths."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if in_library(frame.filename)][-count:]
    chosen = [*ours, *(frame for frame in frames[-2:] if frame not in ours)]
    return " < ".join(f"{short(f.filename)}:{f.lineno} {f.name}" for f in reversed(chosen))


def short(filename: str) -> str:
    """Return a file's path from its package on."""
    path = Path(filename)
    for part in ("site-packages", "benchmarks"):
        if part in path.parts:
            return "/".join(path.parts[path.parts.index(part) + 1 :])
    return "/".join(path.parts[-3:]) if in_library(filename) else path.name


def one_line(text: Any, limit: int) -> str:
    """Return a text on one line, cut to a length."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
