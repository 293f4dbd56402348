"""`RowStream`: an endless stream of token rows, drawn from weighted sources in random order.

The row at a position depends on the seed and the position alone. So a run that goes on at a
position sees the same rows, and processes can share the positions of a batch among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.row_files import RowFiles
from zeroxla.cli.data.row_kinds import TrainingRow
from zeroxla.program.extras import extra

if TYPE_CHECKING:
    import grain

_Encoded = TypeVar("_Encoded")
_Made = TypeVar("_Made", covariant=True)

_ATTEMPTS = 100
_FAR = 2**40  # where substitutes for bad rows are drawn; no run comes there


@dataclass(frozen=True, slots=True)
class Source:
    """RowFiles, and the share of the stream that is drawn from them.

    Attributes:
      rows: the rows.
      weight: a number above 0; the shares are the weights over their sum.
    """

    rows: RowFiles
    weight: float = 1.0


class AnyRowEncoder(Protocol[_Made]):
    """Turns rows into tokens, and rows that cannot be used into the reasons."""

    @property
    def length(self) -> int:
        """L. A sequence has at most L + 1 tokens."""
        ...

    def encode(self, rows: Sequence[TrainingRow]) -> Sequence[_Made | RowError]: ...


class RowStream(Generic[_Encoded]):
    """An endless stream of token rows, or of what else its encoder makes, from weighted sources.

    Each source is gone through in random order, all of its rows before the first one again, in
    another order each time. The sources take turns, so that their shares of every long part of the
    stream are their weights, within 1 %.

    A row whose tokens cannot be used is counted, and another row that is drawn at random takes its
    place. Which one follows from the seed and the position too.

    Args:
      sources: the sources.
      encoder: turns rows into tokens.
      bad: counts the rows that cannot be used.
      seed: chooses the order; not negative.

    Raises:
      ImportError: grain is not installed.
      ValueError: a weight is not above 0.
    """

    def __init__(
        self, sources: Sequence[Source], encoder: AnyRowEncoder[_Encoded], bad: BadRows, seed: int
    ) -> None:
        for source in sources:
            if not 0 < source.weight < float("inf"):
                names = ", ".join(map(str, source.rows.paths))
                raise ValueError(f"{names} has the weight {source.weight}; give one above 0")
        self.sources, self.encoder = sources, encoder
        self._bad, self._seed = bad, seed
        self._order = _order(sources, seed)

    def rows(self, positions: Sequence[int]) -> list[_Encoded]:
        """Return the token rows at some positions of the stream.

        Raises:
          ValueError: too many rows are bad.
        """
        found = self._encode([self._chosen(position) for position in positions])
        return [
            self._substitute(position) if isinstance(row, RowError) else row
            for position, row in zip(positions, found, strict=True)
        ]

    def draw(self, position: int) -> float:
        """Return a random number between 0 and 1 that belongs to a position."""
        return float(self.generator(position).random())

    def validation(self, number: int) -> list[_Encoded]:
        """Return the token rows of rows that are held out: at most `number`, always the same.

        They are taken from the sources by their weights, at equal distances. A source that holds
        fewer gives all of them. Rows that cannot be used are counted and left out.
        """
        weight = sum(source.weight for source in self.sources)
        found: list[_Encoded] = []
        for source in self.sources:
            rows = source.rows
            wanted = min(rows.num_valid, max(1, round(number * source.weight / weight)))
            indices = np.linspace(0, rows.num_valid - 1, wanted).astype(int)
            read, places = [], []
            for index in map(int, indices):
                row, place = _read(rows, index, valid=True)
                read.append(row)
                places.append(place)
            found += [x for x in self._encoded(read, places) if not isinstance(x, RowError)]
        self._bad.check()
        return found[:number]

    def _chosen(self, position: int) -> tuple[int, int]:
        """Return the source and the index of the row at a position."""
        chosen = self._order[position]
        assert chosen is not None, "grain leaves out no row, because nothing is filtered"
        return chosen

    def _encode(self, chosen: Sequence[tuple[int, int]]) -> list[_Encoded | RowError]:
        """Return the tokens of rows, given as (source, index)."""
        read = [_read(self.sources[number].rows, index) for number, index in chosen]
        found = self._encoded([row for row, _ in read], [place for _, place in read])
        self._bad.check()
        return found

    def _encoded(
        self, rows: Sequence[TrainingRow | RowError], places: Sequence[str]
    ) -> list[_Encoded | RowError]:
        good = [row for row in rows if not isinstance(row, RowError)]
        tokens = iter(self.encoder.encode(good))
        found = [row if isinstance(row, RowError) else next(tokens) for row in rows]
        for row, place in zip(found, places, strict=True):
            if isinstance(row, RowError):
                self._bad.add(place, str(row))
        return found

    def _substitute(self, position: int) -> _Encoded:
        generator = self.generator(position)
        for _ in range(_ATTEMPTS):
            other = _FAR + int(generator.integers(_FAR))
            row = self._encode([self._chosen(other)])[0]
            if not isinstance(row, RowError):
                return row
        raise ValueError(
            f"{_ATTEMPTS} rows that were drawn one after the other cannot be used (the last one: "
            f"{next(reversed(self._bad.found.values()))}); mend the rows"
        )

    def generator(self, position: int) -> np.random.Generator:
        """Return a generator of random numbers that belongs to the seed and a position."""
        return np.random.Generator(np.random.Philox(key=[self._seed, position]))


@dataclass(frozen=True, slots=True)
class _Indices:
    """A grain random-access source of a source's number and the numbers of its rows."""

    source: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.source, index


def _order(sources: Sequence[Source], seed: int) -> grain.MapDataset[Any]:
    """Return the endless order as (source, index of a row)."""
    with extra("cli", "batches need"):  # here, because it takes long to import
        import grain
    parts = []
    for number, source in enumerate(sources):
        # grain takes seeds of 32 bits. Islands have longer ones.
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
        part = grain.MapDataset.source(_Indices(number, len(source.rows)))
        parts.append(part.shuffle(seed=int.from_bytes(digest, "big")).repeat())
    if len(parts) == 1:
        return parts[0]
    return grain.MapDataset.mix(parts, weights=[source.weight for source in sources])


def _read(rows: RowFiles, index: int, *, valid: bool = False) -> tuple[TrainingRow | RowError, str]:
    place = rows.place(index, valid=valid)
    try:
        return rows.read(index, valid=valid), place
    except RowError as error:
        return RowError(f"changed since it was first read: {error}"), place
