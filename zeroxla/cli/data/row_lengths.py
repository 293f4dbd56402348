"""`RowLengths`: how long rows are in tokens, and what becomes of those longer than a sequence.

Shapes: N rows that were measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.mixture import AnyRowEncoder, Source
from zeroxla.cli.data.preferences import PreferenceEncoder, TokenPreference
from zeroxla.cli.data.row_encoder import RowEncoder, TokenRow

SAMPLE_ROWS = 10_000
"""The number of rows that are measured. Of more rows a random sample is."""
SAMPLE_BYTES = 64 << 20
"""The bytes of rows that are measured; a sample of longer rows has fewer."""
_AT_ONCE = 256  # rows that are in memory at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """The lengths of rows in tokens.

    Attributes:
      tokens_N: int64[N], the tokens of each row; of a preference those of its longer response, with
        the prompt.
      needed_N: int64[N], the fewest tokens from a row's beginning that hold something to learn.
      anywhere_N: bool[N], whether a row is a document, which may begin at any of its tokens.
      num_rows: the number of rows of the data. If it is more than N, these are a random sample.
      unit: one word for the thing that is counted: "token".
    """

    tokens_N: np.ndarray
    needed_N: np.ndarray
    anywhere_N: np.ndarray
    num_rows: int
    unit: str

    def percentile(self, share: float) -> int:
        """Return the length that a share of the rows does not exceed; the next one that a row
        has."""
        return int(np.percentile(self.tokens_N, share, method="higher"))

    def report(self, length: int, *, too_long: str, packing: bool) -> str:
        """Say in a few sentences how long rows are, and what becomes of those that are longer than
        a sequence.

        Args:
          length: L. A sequence has L + 1 tokens.
          too_long: as for `RowEncoder`.
          packing: whether rows share sequences.
        """
        size, n = length + 1, len(self.tokens_N)
        sample = f" (a random sample of {self.num_rows:,})" if n < self.num_rows else ""
        said = (
            f"{n:,} rows{sample} have {_median(self.tokens_N):,} {self.unit}s at the median and "
            f"{self.tokens_N.max():,} at most"
        )
        longer_N = self.tokens_N > size
        if not longer_N.any():
            return f"{said}; none is longer than a sequence, which takes {size:,}."
        found = self.tokens_N[longer_N]
        said += (
            f". {len(found):,} of them ({len(found) / n:.1%}) are longer than a sequence, which "
            f"takes {size:,}: with a median of {_median(found):,} and at most {found.max():,}. "
        )
        fates = []
        documents = int((longer_N & self.anywhere_N).sum())
        if documents:
            how = (
                "are cut into pieces, and nothing is lost"
                if packing
                else "give a window at another random place each time"
            )
            fates.append(f"{documents:,} documents {how}")
        if others := len(found) - documents:
            if too_long == "bad":
                fates.append(f"{others:,} are dropped as bad rows (--too-long bad)")
            else:
                lost = int((longer_N & ~self.anywhere_N & (self.needed_N > size)).sum())
                rest = f"; {lost:,} of these hold nothing to learn before, and are bad rows"
                fates.append(
                    f"{others:,} are cut at their end (--too-long cut){rest if lost else ''}"
                )
        return f"{said}{'; '.join(fates)}."


def measure(
    sources: Sequence[Source], encoder: RowEncoder | PreferenceEncoder, bad: BadRows
) -> RowLengths:
    """Return the lengths of rows, those held out too.

    Args:
      sources: the rows.
      encoder: what turns them into tokens. Its length does not matter.
      bad: counts the rows that no length lets be used.

    Raises:
      ValueError: too many rows are bad, or none is good.

    Cost: turns at most `SAMPLE_ROWS` rows, or `SAMPLE_BYTES`, into tokens.
    """
    rows = encoder.rows if isinstance(encoder, PreferenceEncoder) else encoder
    endless = dataclasses.replace(rows, length=sys.maxsize >> 1, too_long="cut")
    unlimited: AnyRowEncoder[Any] = (
        PreferenceEncoder(endless) if isinstance(encoder, PreferenceEncoder) else endless
    )
    found: list[tuple[int, int, bool]] = []
    chosen, drawn = _chosen(sources), 0
    while some := list(itertools.islice(chosen, _AT_ONCE)):
        drawn += len(some)
        read, places = [], []
        for source, index, valid in some:
            place = source.rows.place(index, valid=valid)
            try:
                read.append(source.rows.read(index, valid=valid))
                places.append(place)
            except RowError as error:
                bad.add(place, f"changed since it was first read: {error}")
        for row, place in zip(unlimited.encode(read), places, strict=True):
            if isinstance(row, RowError):
                bad.add(place, str(row))
            else:
                found.append(_measured(row))
        bad.check()
    if not found:
        raise ValueError("no row can be used; mend the rows")
    tokens, needed, anywhere = map(np.array, zip(*found))
    total = sum(len(source.rows) + source.rows.num_valid for source in sources)
    return RowLengths(
        tokens_N=tokens,
        needed_N=needed,
        anywhere_N=anywhere,
        num_rows=total if drawn < total else len(found),
        unit=rows.vocabulary.unit,
    )


def _chosen(sources: Sequence[Source]) -> Iterator[tuple[Source, int, bool]]:
    """Yield the rows to measure as (source, index, whether it is held out): all, or the same random
    ones each time."""
    parts = [
        (source, valid, source.rows.num_valid if valid else len(source.rows))
        for source in sources
        for valid in (False, True)
    ]
    ends = np.cumsum([number for _, _, number in parts])
    total, num_bytes = int(ends[-1]), 0
    generator = np.random.Generator(np.random.Philox(key=0))
    # Without the order of the file: a sample that ends at its bytes is a sample of all rows, too.
    numbers = generator.choice(total, min(total, SAMPLE_ROWS), replace=False, shuffle=True)
    for number in map(int, numbers):
        part = int(np.searchsorted(ends, number, side="right"))
        source, valid, length = parts[part]
        index = number - int(ends[part]) + length
        num_bytes += source.rows.num_bytes(index, valid=valid)
        yield source, index, valid
        if num_bytes > SAMPLE_BYTES:
            return


def _measured(row: TokenRow | TokenPreference) -> tuple[int, int, bool]:
    """Return a row's tokens, the fewest that hold something to learn, and whether it is a
    document."""
    if isinstance(row, TokenRow):
        return len(row.tokens_T), int(row.counted_T.argmax()) + 1, row.may_begin_anywhere
    sides = [_measured(side) for side in (row.chosen, row.rejected)]
    ids = [side.tokens_T for side in (row.chosen, row.rejected)]
    shorter = min(map(len, ids))
    differ_T = ids[0][:shorter] != ids[1][:shorter]
    differs = int(differ_T.argmax()) if differ_T.any() else shorter
    needed = max(differs + 1, *(needed for _, needed, _ in sides))
    return max(tokens for tokens, _, _ in sides), needed, False


def _median(tokens: np.ndarray) -> int:
    return round(float(np.median(tokens)))
