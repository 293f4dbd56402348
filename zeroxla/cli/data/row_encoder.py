"""`RowEncoder`: turns rows into sequences of tokens, with the targets that count.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.data.row_kinds import Conversation, Pair, Preference, TrainingRow
from zeroxla.cli.data.vocabulary import Spans, Vocabulary


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row in tokens.

    Attributes:
      tokens_T: int32[T].
      counted_T: bool[T], whether the loss of a token counts, as the target of the one before it.
        The first token is no target.
      may_begin_anywhere: whether every part of the row is as good as its beginning.
    """

    tokens_T: np.ndarray
    counted_T: np.ndarray
    may_begin_anywhere: bool = False

    def pieces(self, length: int) -> list[TokenRow]:
        """Cut the row into pieces of at most `length` + 1 tokens.

        A document is cut where each piece is full, and a piece begins with the last token of the
        one before, so that every token but the first is a target once. Other rows are cut at their
        end.
        """
        size = length + 1
        if not self.may_begin_anywhere:
            return [TokenRow(self.tokens_T[:size], self.counted_T[:size])]
        made = []
        for first in range(0, max(1, len(self.tokens_T) - 1), length):
            counted_T = self.counted_T[first : first + size].copy()
            counted_T[0] = False
            made.append(TokenRow(self.tokens_T[first : first + size], counted_T))
        return made

    def window(self, length: int, share: float = 0.0) -> TokenRow:
        """Return at most `length` + 1 tokens: of a document those at a place between its beginning
        (share 0) and its end (1), of other rows the first."""
        size = length + 1
        spare = len(self.tokens_T) - size
        first = round(share * spare) if self.may_begin_anywhere and spare > 0 else 0
        counted_T = self.counted_T[first : first + size].copy()
        counted_T[:1] = False
        return TokenRow(self.tokens_T[first : first + size], counted_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEncoder:
    """Turns rows into tokens.

    A conversation becomes the text of the chat template. A token counts if any of its characters
    belongs to a turn of the assistant that is learned. The prompt and the
    response of a pair become tokens apart, so that the prompt's are those that generation will see;
    the response's count. All tokens of a document count. Pairs and documents begin and end with the
    tokens that begin and end a document in this vocabulary, and the one at the end counts.

    Attributes:
      vocabulary: turns text into tokens.
      template: the chat template; None if there are no conversations.
      length: L. A sequence has at most L + 1 tokens: inputs and, shifted by one, targets.
      too_long: what becomes of conversations and pairs that are longer: "cut" keeps their
        beginning, "bad" counts them as bad rows.
    """

    vocabulary: Vocabulary
    template: ChatTemplate | None
    length: int
    too_long: Literal["cut", "bad"] = "cut"

    def encode(self, rows: Sequence[TrainingRow]) -> list[TokenRow | RowError]:
        """Turn rows into tokens, and rows that cannot be used into the reasons."""
        found: list[TokenRow | RowError | None] = [None] * len(rows)
        texts: list[str] = []
        places: list[tuple[int, list[tuple[int, int]] | None]] = []
        for i, row in enumerate(rows):
            if isinstance(row, Conversation):
                assert self.template is not None, "there are conversations, and no chat template"
                try:
                    text, learned = self.template.render(
                        row.messages, tools=row.tools, num_given=row.num_given
                    )
                except RowError as error:
                    found[i] = error
                    continue
                texts.append(text)
                places.append((i, learned))
            elif isinstance(row, Preference):
                found[i] = RowError("changed since it was first read: it is a preference")
            else:
                parts = [row.prompt, row.response] if isinstance(row, Pair) else [row.text]
                texts += parts
                places.append((i, None))
        encoded = iter(self.vocabulary.encode_spans(texts))
        for i, spans in places:
            row = rows[i]
            if isinstance(row, Conversation):
                made = _conversation(next(encoded), spans or [])
            elif isinstance(row, Pair):
                made = self._framed(next(encoded).ids_T, next(encoded).ids_T)
            else:
                made = self._framed(np.empty(0, np.int32), next(encoded).ids_T, anywhere=True)
            found[i] = self._checked(made)
        return [x for x in found if x is not None]

    def _framed(
        self, prompt: np.ndarray, response: np.ndarray, *, anywhere: bool = False
    ) -> TokenRow:
        """Put the tokens that begin and end a document around a prompt and a response."""
        ends = [[] if x is None else [x] for x in (self.vocabulary.first, self.vocabulary.last)]
        parts = [np.array(x, np.int32) for x in (ends[0], prompt, response, ends[1])]
        tokens_T = np.concatenate(parts)
        counted_T = np.arange(len(tokens_T)) >= len(parts[0]) + len(prompt)
        return TokenRow(tokens_T, counted_T, anywhere)

    def _checked(self, row: TokenRow) -> TokenRow | RowError:
        """Return a row in which a target counts, or what is wrong."""
        size = self.length + 1
        row.counted_T[:1] = False
        if len(row.tokens_T) > size and not row.may_begin_anywhere and self.too_long == "bad":
            return RowError(
                f"the row has {len(row.tokens_T)} {self.vocabulary.unit}s, more than the {size} of "
                "a sequence; give a larger --length"
            )
        if row.counted_T[: None if row.may_begin_anywhere else size].any():
            return row
        if row.counted_T.any():
            return RowError(
                f"the first {size} of its {len(row.tokens_T)} {self.vocabulary.unit}s hold nothing "
                "to learn; give a larger --length"
            )
        return RowError(f"none of its {len(row.tokens_T)} {self.vocabulary.unit}s is to be learned")


def _conversation(encoded: Spans, spans: Sequence[tuple[int, int]]) -> TokenRow:
    """Return the tokens of a rendered conversation; those that meet a span count."""
    first_T, end_T = encoded.spans_T2[:, 0], encoded.spans_T2[:, 1]
    counted_T = np.zeros(len(encoded.ids_T), bool)
    for first, end in spans:
        counted_T |= np.maximum(first_T, first) < np.minimum(end_T, end)
    return TokenRow(encoded.ids_T, counted_T)
