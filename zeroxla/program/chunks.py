"""Packs things of different sizes into chunks, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def packed(things: Iterable[_T], size_of: Callable[[_T], int], limit: int) -> list[list[_T]]:
    """Join neighbouring things into chunks that are not larger than a limit.

    A thing that is larger than the limit gets a chunk of its own.

    >>> packed([3, 1, 9, 2, 2], lambda n: n, 5)
    [[3, 1], [9], [2, 2]]
    """
    packs: list[list[_T]] = []
    size = 0
    for thing in things:
        more = size_of(thing)
        if not packs or size + more > limit:
            packs.append([])
            size = 0
        packs[-1].append(thing)
        size += more
    return packs
