"""Turns tokens into text while they come, and never shows half a character.

A character may be several tokens, and a tokenizer may write a token otherwise after others than
alone. So a text is decoded again from a place where it is whole, and given out when it is whole
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

_HALF = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 4  # bytes of a character in UTF-8, and so tokens that one may be

Finished = Literal["eos", "stop", "length"]


class TokenText:
    """Decodes tokens one after another.

    The pieces together are the text of all tokens, decoded at once.

    Args:
      decode: returns the text of tokens.
      before: the tokens that the first one follows. Some tokenizers leave out the space of a text's
        first word.

    >>> text = TokenText(lambda tokens: bytes(tokens).decode(errors="replace"))
    >>> [text.add(byte) for byte in "né".encode()], text.rest()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._shown = list(before)  # the tokens of the last piece, which the next ones follow
        self._held: list[int] = []  # tokens that have given no text yet

    def add(self, token: int) -> str:
        """Return the text that is whole with this token; "" while a character is not."""
        self._held.append(token)
        text = self._new_text(len(self._held))
        if text and not text.endswith(_HALF):
            self._shown, self._held = self._held, []
            return text
        if len(self._held) < _MOST_PARTS:
            return ""
        # The first token begins no character: it would be whole by now.
        text = self._new_text(1)
        self._shown.append(self._held.pop(0))
        return text

    def rest(self) -> str:
        """Return the text of the tokens that are held back, at the end."""
        text = self._new_text(len(self._held))
        self._shown, self._held = [*self._shown, *self._held], []
        return text

    def _new_text(self, number: int) -> str:
        """Return the text that the first of the tokens add that are held back."""
        before = self._decode(self._shown)
        return self._decode([*self._shown, *self._held[:number]])[len(before) :]


class AnswerText:
    """The text of a row's answer, which ends at an end token, at a stop text, or at its length.

    Args:
      decode, before: as for `TokenText`.
      ends: the tokens that end an answer. They give no text.
      stops: texts that end an answer. They, and what follows, are no part of it.

    Attributes:
      text: the answer so far, without what is held back.
      num_tokens: the number of its tokens, those that end it included.
      finished: the reason why it has ended: an end token ("eos"), a stop text ("stop"), or as many
        tokens as it may have ("length"); None as long as it has not.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        before: Sequence[int] = (),
        *,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
    ) -> None:
        self._tokens = TokenText(decode, before)
        self._ends, self._stops = frozenset(ends), tuple(stops)
        self._held = ""  # the end of the text, if it may begin a stop text
        self.text, self.num_tokens = "", 0
        self.finished: Finished | None = None

    def add(self, token: int, *, is_last: bool) -> str:
        """Add a token, and return the text that is certain to belong to the answer.

        Args:
          token: the next token of the row.
          is_last: whether the row draws no more.
        """
        if self.finished is not None:
            return ""
        self.num_tokens += 1
        ended = token in self._ends
        new = self._tokens.rest() if ended else self._tokens.add(token)
        if is_last and not ended:
            new += self._tokens.rest()
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.finished, self._held, text = "stop", "", text[: min(places)]
        elif ended or is_last:
            self.finished, self._held = ("eos" if ended else "length"), ""
        else:
            held = self._num_held(text)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += text
        return text

    def end(self) -> str:
        """Return what is held back, if the row is left before its end."""
        text, self._held = self._held + self._tokens.rest(), ""
        self.text += text
        return text

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of a text with which a stop text begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
