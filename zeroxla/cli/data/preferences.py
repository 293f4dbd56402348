"""Preferences in tokens, and batches of them.

Shapes: B pairs, L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_batches import batches_of, held_out, own_rows, padded
from zeroxla.cli.data.row_encoder import RowEncoder, TokenRow
from zeroxla.cli.data.row_kinds import Conversation, Pair, Preference, TrainingRow

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True, slots=True)
class TokenPreference:
    """A preference in tokens: the prompt with each of the responses, whose targets count."""

    chosen: TokenRow
    rejected: TokenRow


@dataclass(frozen=True, slots=True)
class PreferenceEncoder:
    """Turns preferences into tokens.

    A response becomes tokens with its prompt, as a pair or a conversation by itself does. Responses
    that are too long are cut at their end, or bad, as the encoder of rows says; the prompt stays.
    If nothing is left of one of them, or nothing in which they differ, the row is bad.

    Attributes:
      rows: the encoder of pairs and conversations.
    """

    rows: RowEncoder

    @property
    def length(self) -> int:
        """L. A sequence has at most L + 1 tokens."""
        return self.rows.length

    def encode(self, rows: Sequence[TrainingRow]) -> list[TokenPreference | RowError]:
        """Turn preferences into tokens, and those that cannot be used into the reasons."""
        halves: list[Pair | Conversation] = []
        for row in rows:
            if isinstance(row, Preference):
                halves += [row.chosen, row.rejected]
        encoded = iter(self.rows.encode(halves))
        return [
            self._checked(next(encoded), next(encoded))
            if isinstance(row, Preference)
            else RowError("changed since it was first read: it is no preference any more")
            for row in rows
        ]

    def _checked(
        self, chosen: TokenRow | RowError, rejected: TokenRow | RowError
    ) -> TokenPreference | RowError:
        if isinstance(chosen, RowError):
            return RowError(f'"chosen": {chosen}')
        if isinstance(rejected, RowError):
            return RowError(f'"rejected": {rejected}')
        size, unit = self.length + 1, self.rows.vocabulary.unit
        if np.array_equal(chosen.tokens_T[:size], rejected.tokens_T[:size]):
            return RowError(
                f'the first {size} {unit}s of "chosen" and "rejected", with the prompt, are equal; '
                "give a larger --length"
            )
        return TokenPreference(chosen, rejected)


def preference_batches(
    stream: RowStream[TokenPreference], *, batch: int, shard_index: int = 0, shard_count: int = 1
) -> grain.IterDataset:
    """Make an endless stream of batches of preferences.

    Args:
      stream: the preferences. L is the length of its encoder.
      batch: B, the pairs of the global batch.
      shard_index, shard_count: as for `row_batches`.

    Returns:
      A grain IterDataset of {"chosen", "rejected": int32[B / count, L + 1], "chosen_mask",
      "rejected_mask": float32[B / count, L]}, otherwise as `row_batches`.

    Raises:
      ImportError, ValueError: as `row_batches`.
    """

    def make(rows: Sequence[TokenPreference], _: Sequence[int]) -> dict[str, np.ndarray]:
        return preference_batch(rows, len(rows), stream.encoder.length)

    return batches_of(stream, make, batch, own_rows(batch, shard_index, shard_count))


def validation_preference_batches(
    stream: RowStream[TokenPreference], *, batch: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield validation batches of held-out preferences, the same ones each time.

    There are at most `num_batches`. The last one may end with empty pairs, which count nothing.

    Raises:
      ValueError: none of the held-out rows can be used, or too many are bad.
    """
    rows = held_out(stream, batch * num_batches)
    for first in range(0, len(rows), batch):
        yield preference_batch(rows[first : first + batch], batch, stream.encoder.length)


def preference_batch(
    rows: Sequence[TokenPreference], batch: int, length: int
) -> dict[str, np.ndarray]:
    """Return a batch of preferences, filled up with empty pairs."""
    made: dict[str, np.ndarray] = {}
    for name, side in (
        ("chosen", [row.chosen for row in rows]),
        ("rejected", [row.rejected for row in rows]),
    ):
        found = padded([row.window(length) for row in side], batch, length)
        made |= {name: found["tokens"], f"{name}_mask": found["mask"].astype(np.float32)}
    return made
