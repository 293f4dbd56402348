"""`IslandLink`: how an island's process reaches those of the other islands. It moves bytes.

`LocalLink` joins islands that are threads of one process; tests and notebooks use it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class IslandLink(Protocol):
    """Joins one process of an island to its likes in the others.

    Attributes:
      num: the number of islands.
      index: the number of this one.
    """

    @property
    def num(self) -> int: ...

    @property
    def index(self) -> int: ...

    def swap(self, name: str, parts: Sequence[bytes]) -> list[bytes]:
        """Send a part to each island, and return what each has sent to this one, its own included.

        Args:
          name: says what is exchanged. All islands give the same names, in any order.
          parts: the parts, by the number of the island.
        """
        ...


class LocalLink:
    """Joins threads of one process. `LocalLink.make(num)` makes one for each island."""

    def __init__(self, index: int, shared: _Post) -> None:
        self.index, self._shared = index, shared

    @staticmethod
    def make(num: int, *, timeout: float = 300.0) -> list[LocalLink]:
        """Return the links of so many islands; an exchange waits `timeout` seconds for a part."""
        shared = _Post(num, timeout)
        return [LocalLink(index, shared) for index in range(num)]

    @property
    def num(self) -> int:
        """The number of islands."""
        return self._shared.num

    def swap(self, name: str, parts: Sequence[bytes]) -> list[bytes]:
        """See `IslandLink`."""
        for to, part in enumerate(parts):
            self._shared.put((name, self.index, to), part)
        return [self._shared.take((name, source, self.index)) for source in range(self.num)]


class _Post:
    """Letters between threads, by (name, from, to)."""

    def __init__(self, num: int, timeout: float) -> None:
        self.num, self._timeout = num, timeout
        self._letters: dict[tuple[str, int, int], bytes] = {}
        self._arrived = threading.Condition()

    def put(self, key: tuple[str, int, int], letter: bytes) -> None:
        with self._arrived:
            self._letters[key] = letter
            self._arrived.notify_all()

    def take(self, key: tuple[str, int, int]) -> bytes:
        with self._arrived:
            if not self._arrived.wait_for(lambda: key in self._letters, self._timeout):
                name, source, _ = key
                raise TimeoutError(
                    f"island {source} has not sent {name!r} within {self._timeout:.0f} s; see what "
                    "its thread has raised"
                )
            return self._letters.pop(key)
