"""Tells the launcher how this process fares: that it begins a step, compiles, or has failed.

Each report is one letter in a pipe that `zeroxla launch` reads. Without a launcher nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator

from zeroxla.mesh.processes.environment import PROGRESS

# The launcher's `Process` reads these letters.
STEP = "."
COMPILES = "c"
COMPILED = "C"
FAILS_FIRST = "!"
FAILS_AFTER = ","


def mark() -> None:
    """Report that a step begins. Costs a microsecond."""
    _tell(STEP)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Report that inside a program is compiled, which may take this process longer than others."""
    _tell(COMPILES)
    try:
        yield
    finally:
        _tell(COMPILED)


def fails(*, first: bool) -> None:
    """Report that this process is about to end, as the first of its run or because of another."""
    _tell(FAILS_FIRST if first else FAILS_AFTER)


def _tell(letter: str) -> None:
    descriptor = _descriptor()
    if descriptor is not None:
        with contextlib.suppress(OSError):  # the pipe is full, or nobody reads it any longer
            os.write(descriptor, letter.encode())


@functools.cache
def _descriptor() -> int | None:
    # A program that this process starts inherits the variable but not the pipe, so the descriptor's
    # number may be another file there. The inode tells whether it is the pipe.
    number, _, inode = os.environ.get(PROGRESS, "").partition(":")
    if not number.isdecimal():
        return None
    with contextlib.suppress(OSError):
        found = os.fstat(int(number))
        if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode:
            return int(number)
    return None
