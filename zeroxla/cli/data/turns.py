"""Finds what the model learns of a conversation in the text that a chat template made of it.

The text is the one of the whole conversation: templates write a message otherwise when others
follow it, so that the beginning of a conversation is no beginning of its text. Three things are
known of the text (`Traced`): which characters are fields of which message, which part the template
wrote while its loop stood at which message, and how far it agrees with the prompt for an answer.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.row_values import CALLS, THOUGHTS
from zeroxla.cli.data.traced_text import traced

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Messages, Any, bool], str]
"""Turns messages, tools and `add_generation_prompt` into a `Traced` text."""

ANSWER = ("content", *THOUGHTS, *CALLS)
"""The keys of what the assistant writes."""


class Field(NamedTuple):
    """An origin of characters: a field of a message.

    Attributes:
      message: the message's place; None for the tools and for the token that begins the text.
      key: the field's key.
      part: which one of several calls, and "arguments" for those.
    """

    message: int | None
    key: str
    part: tuple[Any, ...] = ()


class LoopPlace(NamedTuple):
    """A place in the text where the template was at a loop.

    Attributes:
      event: "enter" it, "leave" it, be "at" an item, or "set" a name to a message.
      message: the message that the item or the value is, or is of; None for others.
    """

    event: str
    message: int | None = None


BEGIN = "bos_token"
"""The key of the token that begins the text."""
GENERATION = "generation"
"""The origin of what `{% generation %}` encloses."""


class TextPiece(NamedTuple):
    """A part of the text.

    Attributes:
      first, end: its place.
      message: the message that the template was at; None outside of loops over messages.
      visit: tells apart the times that loops were at a message.
    """

    first: int
    end: int
    message: int | None
    visit: int


def fields_of(text: str) -> list[tuple[int, int, Field]]:
    """Return the characters and places of a text that are fields of messages."""
    return [span for span in getattr(text, "spans", ()) if isinstance(span[2], Field)]


def pieces_of(text: str) -> list[TextPiece]:
    """Cut a text where the template's loops went from one message to another."""
    pieces: list[TextPiece] = []
    outside = _Now(None, 0, True)
    loops: list[_Now] = []  # that the template is in
    place = 0
    for visit, (first, _, origin) in enumerate(
        (*getattr(text, "spans", ()), (len(text), 0, LoopPlace("end"))), 1
    ):
        if not isinstance(origin, LoopPlace):
            continue
        now = loops[-1] if loops else outside
        if first > place:
            if pieces and pieces[-1].visit == now.visit:
                pieces[-1] = pieces[-1]._replace(end=first)
            else:
                pieces.append(TextPiece(place, first, now.message, now.visit))
            place = first
        if origin.event == "enter":
            loops.append(now)
        elif origin.event == "leave" and loops:
            loops.pop()
        elif origin.event == "at" and loops:
            around = loops[-2] if len(loops) > 1 else outside
            if origin.message in (None, around.message):
                loops[-1] = around._replace(is_settled=origin.message is not None)
            else:
                loops[-1] = _Now(origin.message, visit, True)
        elif origin.event == "set" and loops and not now.is_settled:  # in a loop over numbers
            loops[-1] = _Now(origin.message, visit, True)
    return pieces


class _Now(NamedTuple):
    """The message that a loop is at, the visit, and whether an item or a name has said so."""

    message: int | None
    visit: int
    is_settled: bool


class TurnFinder:
    """Finds turns in the texts of one template.

    Args:
      render: the template.
    """

    def __init__(self, render: Render) -> None:
        self.render = render

    def find(
        self, text: str, messages: Messages, tools: Any, wanted: Collection[int]
    ) -> list[tuple[int, int]]:
        """Return the first character of each turn that is wanted, and the one after its last.

        Raises:
          RowError: a turn cannot be found.
        """
        found = _Conversation(self, text, messages, tools)
        spans = [span for i in sorted(wanted) for span in found.turn(i)]
        return [(first, end) for first, end in spans if first < end]

    @functools.cached_property
    def headers(self) -> tuple[str, ...] | None:
        """What the template writes at the beginning of an answer, such as "<|assistant|>"; empty if
        nothing, None if that is unknown because the template refuses a plain conversation.

        It is the prompt for an answer. A template without one writes the same before each answer,
        with letters, as the role is.
        """
        said = [
            {"role": role, "content": traced("a", Field(i, "content"))}
            for i, role in enumerate(("user", "assistant") * 2)
        ]
        for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
            try:
                text = self.render(said, tools, False)
            except RowError:
                continue
            found = _Conversation(self, text, said, tools)
            leads = [found.lead(i) for i in (1, 3)]
            if None in leads:
                continue
            text = str.__str__(text)
            prompted = [text[x[0] : found.prompted(i, *x)] for i, x in zip((1, 3), leads) if x]
            headers = {x for x in prompted if x.strip()}
            if not headers:
                header = _common(*(text[x[0] : x[1]] for x in leads if x))
                headers = {header} if any(map(str.isalnum, header)) else set()
            return tuple(sorted(headers))
        return None


class _Conversation:
    """A conversation in a text."""

    def __init__(self, finder: TurnFinder, text: str, messages: Messages, tools: Any) -> None:
        self._finder, self._traced, self._text = finder, text, str.__str__(text)
        self._messages, self._tools = messages, tools
        self._pieces, self._fields = pieces_of(text), fields_of(text)
        self._prompted: dict[Any, int] = {}  # by what is before an answer: the prompt's part of it

    def turn(self, i: int) -> list[tuple[int, int]]:
        """Return the places of the turn of message i. There are several if the template writes
        other messages, such as results of its calls, among it."""
        pieces = self._pieces_of(i)
        spans = [(x.first, x.end) for x in pieces] or [self._between_prompts(i)]
        if pieces:
            spans[0] = self._first(i, pieces[0]), pieces[0].end
            spans[-1] = spans[-1][0], self._with_tail(i, pieces[-1].end)
        for a, b, field in self._fields:
            is_other = field.message != i and field.key != BEGIN
            if is_other and any(max(a, first) < min(b, end) for first, end in spans):
                raise RowError(
                    f"the chat template writes {field.key} of something else among the assistant's "
                    f"message {i}; {_REMEDY}"
                )
        return spans

    def lead(self, i: int) -> tuple[int, int] | None:
        """Return the place of what the template writes for message i before its first field, after
        the token that begins the text."""
        if not (pieces := self._pieces_of(i)):
            return None
        piece = pieces[0]
        end = min(self._answer(i, piece), default=piece.end)
        begins = (b for _, b, x in self._fields if x.key == BEGIN and piece.first <= b <= end)
        return max(begins, default=piece.first), end

    def prompted(self, i: int, first: int, end: int) -> int:
        """Return the place up to which the prompt for message i gives what is between two
        places."""
        agrees = self._agrees(i, True)
        if agrees is None:
            return first
        place, is_whole = agrees
        if not is_whole:  # what the prompt and the answer have in common ends with a whole mark
            for mark in _MARK.finditer(self._text, first, end):
                if mark.start() < place < mark.end():
                    place = mark.start()
        return max(first, min(place, end))

    def _pieces_of(self, i: int) -> list[TextPiece]:
        """Return the pieces of the one visit in which the template wrote message i; none if that is
        not clear."""
        pieces = [x for x in self._pieces if x.message == i]
        with_fields = {x.visit for x in pieces if self._answer(i, x)}
        # Loops that only look something up may leave white space behind.
        written = {x.visit for x in pieces if self._text[x.first : x.end].strip()}
        visits = with_fields or written
        return [x for x in pieces if x.visit in visits] if len(visits) == 1 else []

    def _answer(self, i: int, piece: TextPiece) -> list[int]:
        """Return the places where fields of an answer begin in a piece."""
        return [
            a
            for a, b, field in self._fields
            if field.message == i and field.key in ANSWER and piece.first <= a and b <= piece.end
        ]

    def _first(self, i: int, piece: TextPiece) -> int:
        """Return the place where the turn of message i begins in its piece."""
        first, end = self.lead(i) or piece[:2]
        lead, headers = self._text[first:end], self._finder.headers
        if end < piece.end and headers and lead in headers:
            return end
        before = self._messages[i - 1] if i else {"role": None}
        same = (lead, before["role"], bool(before.get("tool_calls")))
        if same not in self._prompted:
            self._prompted[same] = self.prompted(i, first, end) - first
        begin = first + self._prompted[same]
        rest = self._text[begin:end]
        if after := max((rest.rfind(x) + len(x) for x in headers or () if x in rest), default=0):
            return begin + after
        if begin > first or not rest.strip() or before["role"] == "assistant":
            return begin
        if headers == ():  # answers have no header: this is the mark of calls, or of thoughts
            return begin
        if end == piece.end:
            raise RowError(
                f"where the assistant's message {i} begins cannot be told, because it is empty; "
                f"{_REMEDY}"
            )
        return end

    def _with_tail(self, i: int, end: int) -> int:
        """Return the end of a turn with what the template writes after all messages, unless the
        prompt for the answer ends with it, too."""
        tail = self._text[end:]
        if not tail or any(x.message is not None for x in self._pieces if x.end > end):
            return end
        try:
            prompt = self._finder.render(self._messages[:i], self._tools, True)
        except RowError:
            return end
        ends = (x.end for x in pieces_of(prompt) if x.message is not None)
        has_fields = any(max(a, end) < b for a, b, _ in self._fields)
        is_of_prompt = tail in str.__str__(prompt)[max(ends, default=0) :]
        return end if is_of_prompt or has_fields else len(self._text)

    def _between_prompts(self, i: int) -> tuple[int, int]:
        """Return the place of a turn in the text of a template that has no loop over messages:
        after the prompt for it, up to where the conversation up to it ends."""
        begin, end = self._agrees(i, True), self._agrees(i + 1, False)
        answer = [a for a, _, x in self._fields if x.message == i and x.key in ANSWER]
        if i + 1 == len(self._messages):
            end = len(self._text), True
        if begin and end and begin[1] and end[1] and answer and answer[0] <= end[0]:
            first = min(begin[0], answer[0])
            if not any(map(str.isalnum, self._text[first : answer[0]])) or self._has_prompt(i):
                return first, end[0]
        raise RowError(
            f"the assistant's message {i} cannot be found in what the chat template writes; "
            f"{_REMEDY}"
        )

    def _has_prompt(self, i: int) -> bool:
        texts = (self._finder.render(self._messages[:i], self._tools, x) for x in (True, False))
        return len({*map(str.__str__, texts)}) == 2

    def _agrees(self, count: int, add_generation_prompt: bool) -> tuple[int, bool] | None:
        """Compare the text with the one of the first messages, from their last field on.

        Returns:
          The place up to which they agree, and whether that is the end of the shorter one. None if
          the template refuses the first messages.
        """
        try:
            text = self._finder.render(self._messages[:count], self._tools, add_generation_prompt)
        except RowError:
            return None
        there, here = 0, 0
        for i in reversed(range(count)):
            ends = [end for x in (text, self._traced) if (end := _last_field(x, i)) is not None]
            if len(ends) == 2:
                there, here = ends
                break
        rest = str.__str__(text)[there:]
        same = _common(rest, self._text[here : here + len(rest)])
        return here + len(same), same == rest


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    return one[: sum(itertools.takewhile(bool, map(operator.eq, one, other)))]


def _last_field(text: str, i: int) -> int | None:
    """Return the place after the last field of message i, in its own piece if it has one."""
    ends = [b for _, b, field in fields_of(text) if field.message == i]
    own = [x for x in pieces_of(text) if x.message == i]
    inside = [b for b in ends if any(x.first <= b <= x.end for x in own)]
    return max(inside or ends, default=None)


_MARK = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_REMEDY = (
    "mark what is to be learned in a copy of the template with {% generation %} and "
    "{% endgeneration %} (--chat-template)"
)
