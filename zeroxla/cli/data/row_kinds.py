"""The kinds of rows that a model learns from: conversations, pairs and documents.

A row is a JSON object. Its keys say what it is:

    {"messages": [{"role": "user", "content": "..."}, ...]}       a conversation
    {"prompt": "...", "response": "..."}  (or "completion")        a pair
    {"text": "..."}                                                a document

If a row has the keys of several kinds, the first of them in this order counts. Other keys are
ignored, and a key whose value is null counts as absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zeroxla.cli.data.bad_rows import RowError

KEYS = ("messages", "tools", "prompt", "response", "completion", "text")
"""The keys that are read."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in turn. The model learns the messages of the assistant.

    Attributes:
      messages: objects with "role", "content", and whatever else the chat template reads.
      tools: descriptions of tools, for the chat template; None if there are none.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response that the model learns."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text, all of which the model learns."""

    text: str


TrainingRow: TypeAlias = Conversation | Pair | Document


def read_row(line: bytes) -> TrainingRow:
    """Return the row that a line of JSON holds.

    Raises:
      RowError: the line is no row; the text says why.
    """
    return row_of(read_object(line))


def read_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON holds, without keys whose value is null.

    Raises:
      RowError: the line holds none.
    """
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise RowError(f"the row is no UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise RowError(f"the row is no JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise RowError("the row is nested too deeply") from error
    if not isinstance(value, dict):
        raise RowError(f"the row is a JSON {_kind(value)}, no object with keys")
    return {key: x for key, x in value.items() if x is not None}


def row_of(value: Mapping[str, Any]) -> TrainingRow:
    """Return the row that an object describes.

    Raises:
      RowError: it has none of the keys, or a value is of the wrong kind or empty.
    """
    if "messages" in value:
        conversation = conversation_of(value)
        if not any(message["role"] == "assistant" for message in conversation.messages):
            roles = ", ".join(dict.fromkeys(x["role"] for x in conversation.messages))
            raise RowError(
                f"no message is of the assistant, so there is nothing to learn (of: {roles})"
            )
        return conversation
    answers = [key for key in ("response", "completion") if key in value]
    if "prompt" in value and answers:
        return Pair(text_of(value, "prompt", may_be_empty=True), text_of(value, answers[0]))
    if "text" in value:
        return Document(text_of(value, "text"))
    if "prompt" in value:
        raise RowError('the row has a "prompt", and neither "response" nor "completion"')
    keys = ", ".join(list(value)[:8]) or "none"
    raise RowError(
        f'the row has none of "messages", "prompt" with "response", and "text"; its keys: {keys}'
    )


def conversation_of(value: Mapping[str, Any]) -> Conversation:
    """Return the conversation in an object with the key "messages".

    Raises:
      RowError: a value is of the wrong kind, or empty.
    """
    return Conversation(_messages(value["messages"]), _tools(value.get("tools")))


def canonical(row: TrainingRow) -> str:
    """Return a text that is equal for equal rows, whatever file they come from."""
    if isinstance(row, Conversation):
        content: Any = {"messages": row.messages, "tools": row.tools}
    elif isinstance(row, Pair):
        content = {"prompt": row.prompt, "response": row.response}
    else:
        content = {"text": row.text}
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def row_hash(row: TrainingRow) -> bytes:
    """Return 8 bytes of BLAKE2b of a row's content.

    Raises:
      RowError: the row has no UTF-8.
    """
    try:
        content = canonical(row).encode()
    except UnicodeEncodeError as error:
        raise RowError("the row has half of a surrogate pair, which is no character") from error
    return hashlib.blake2b(content, digest_size=8).digest()


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RowError(f'"messages" is a JSON {_kind(value)}; it must be an array with messages')
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError(f"message {i} is a JSON {_kind(message)}, no object")
        message = {key: x for key, x in message.items() if x is not None}
        if not isinstance(message.get("role"), str):
            raise RowError(f'message {i} has no "role" that is a string')
        calls = "tool_calls" in message
        if not isinstance(message.get("content", "" if calls else None), str):
            raise RowError(f'message {i} of the {message["role"]} has no "content" that is text')
        messages.append({"content": "", **message})
    return tuple(messages)


def _tools(value: Any) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise RowError(f'"tools" is a JSON {_kind(value)}; it must be an array')
    return value or None


def text_of(value: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    """Return the text that an object has under a key.

    Raises:
      RowError: it is no text, or empty.
    """
    found = value[key]
    if not isinstance(found, str):
        raise RowError(f'"{key}" is a JSON {_kind(found)}; it must be a string')
    if not found and not may_be_empty:
        raise RowError(f'"{key}" is empty')
    return found


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
