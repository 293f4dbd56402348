"""`Traced`: text that knows where its characters came from, whatever a template does to it.

A chat template cuts, trims and joins the fields of messages. The text that it makes must be the one
that plain strings give, so a traced text is a string with the same characters. Beside them it keeps
spans: (first character, the one after the last, origin). A span without characters is a place.

Operations that are not here (`format`, `%`, filters that take characters apart) give plain text,
which has no origins. Whoever reads the spans must take what has none as unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

Span: TypeAlias = tuple[int, int, Any]


class Traced(str):
    """Text with the origins of its characters.

    Args:
      text: the characters.
      spans: their origins, in the order in which they were written.
    """

    spans: Sequence[Span]

    def __new__(cls, text: str, spans: Sequence[Span] = ()) -> Traced:
        made = super().__new__(cls, text)
        made.spans = spans
        return made

    def __str__(self) -> str:
        return self  # so that Jinja2, which calls `str` on all it writes, keeps the origins

    def __add__(self, other: Any) -> Any:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            key = slice(key.__index__(), key.__index__() + 1 or None)
        first, end, step = key.indices(len(self))
        return self._cut(first, max(first, end)) if step == 1 else found

    def _cut(self, first: int, end: int) -> Traced:
        """Return a part. Places at its borders stay. A part without characters keeps the spans that
        it touches as places, so that one sees where a field stood of which nothing is left."""
        kept = [
            (max(a, first) - first, min(b, end) - first, origin)
            for a, b, origin in self.spans
            if (a < end and b > first) or (first <= b and a <= end and (a == b or first == end))
        ]
        return Traced(super().__getitem__(slice(first, end)), kept)

    def _parts(self, parts: Iterable[str], sep: str | None = None) -> list[str]:
        """Return parts that follow each other in the text, with their origins.

        Args:
          parts: them, as plain text.
          sep: the text between them; None for white space, or nothing.
        """
        made, place = [], 0
        for part in parts:
            first = place if sep is not None else self.find(part, place)
            made.append(self._cut(first, first + len(part)))
            place = first + len(part) + len(sep or "")
        return made

    def strip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(super().rstrip(chars))).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._parts(super().splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._parts(super().partition(sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = super().rpartition(sep)
        place = len(before) + len(found)
        return self._cut(0, len(before)), self._cut(len(before), place), self[place:]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        return Traced(new).join(self.split(old, count))

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def join(self, parts: Iterable[str], /) -> str:
        made: list[str] = []
        for part in parts:
            made += [self, part] if made else [part]
        return concat(made)


def concat(parts: Iterable[str]) -> str:
    """Put texts together, with their origins."""
    parts = list(parts)
    spans: list[Span] = []
    length = 0
    for part in parts:
        if isinstance(part, Traced):
            spans += [(a + length, b + length, origin) for a, b, origin in part.spans]
        length += len(part)
    text = "".join(parts)
    return Traced(text, spans) if spans else text


def traced(value: Any, origin: Hashable) -> Any:
    """Return a value of JSON, the strings in it (keys, too) traced to an origin."""
    if isinstance(value, str):
        return Traced(value, [(0, len(value), origin)])
    if isinstance(value, Mapping):
        return {traced(key, origin): traced(x, origin) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [traced(x, origin) for x in value]
    return value


def origins(value: Any) -> Iterator[Any]:
    """Yield the origins of the strings in a value."""
    if isinstance(value, Traced):
        yield from (origin for _, _, origin in value.spans)
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from origins(key)
            yield from origins(x)
    elif isinstance(value, list | tuple):
        for x in value:
            yield from origins(x)
