"""Reads rows that a model answers: JSON objects, one a line, with a prompt or messages.

    {"prompt": "..."}                                              a text to continue
    {"messages": [{"role": "user", "content": "..."}, ...]}        a conversation to answer

If a row has both, the messages count. All its other keys are kept.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.foreign_rows import known_form
from zeroxla.cli.data.row_kinds import Conversation, conversation_of
from zeroxla.cli.data.row_readers import open_rows, row_place
from zeroxla.cli.data.row_values import read_object, text_of

ANSWER = ("response", "tokens", "finished")
"""The keys that an answer adds to its row."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row to answer.

    Attributes:
      place: the file and the line, for people.
      fields: the row's keys and values.
      asks: the text to continue, or the conversation to answer.
    """

    place: str
    fields: Mapping[str, Any]
    asks: str | Conversation


def prompt_rows(path: Path, bad: BadRows) -> Iterator[PromptRow]:
    """Yield the rows of a file that can be answered, in their order; count the others.

    Args:
      path: a file of rows in any form that `open_rows` reads. Blank lines are skipped.
      bad: counts the rows that cannot be answered.

    Raises:
      ValueError, ImportError: as `open_rows`.
    """
    with contextlib.ExitStack() as stack:

        def keep(file: IO[bytes] | None) -> IO[bytes]:
            return stack.enter_context(file or tempfile.TemporaryFile())

        opened = open_rows(path, keep)
        for _, number, line in opened.rows:
            place = row_place(path, number, by_line=opened.by_line)
            bad.rows += 1
            try:
                if isinstance(line, RowError):
                    raise line
                yield PromptRow(place, *_read(line))
            except RowError as error:
                bad.add(place, str(error))


def _read(line: bytes) -> tuple[dict[str, Any], str | Conversation]:
    """Return the keys and values of a row, and what it asks."""
    value = known_form(read_object(line))
    if there := [key for key in ANSWER if key in value]:
        raise RowError(f'the row has "{there[0]}", a key that its answer will have; rename it')
    if "messages" in value:
        asks: str | Conversation = conversation_of(value)
        if asks.messages[-1]["role"] == "assistant":
            raise RowError(
                'the last message has the role "assistant"; leave it out, and it is written anew'
            )
    elif "prompt" in value:
        asks = text_of(value, "prompt", may_be_empty=True)
    else:
        keys = ", ".join(list(value)[:8]) or "none"
        raise RowError(f'the row has neither "prompt" nor "messages"; its keys: {keys}')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("the row has half of a surrogate pair, which is no character") from error
    return json.loads(line), asks
