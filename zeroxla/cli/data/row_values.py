"""Reads the values of a row: a JSON object, texts, messages and tools, each checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeroxla.cli.data.bad_rows import RowError

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
"""Keys under which messages have thoughts."""
CALLS = ("tool_calls", "function_call")
"""Keys under which messages have calls of tools."""
WEIGHTS = ("weight", "train", "training")
"""Keys of a message that say whether it is learned: OpenAI's "weight", 0 or 1, and the booleans of
other formats."""


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
        raise RowError(f"the row is a JSON {json_type(value)}, no object with keys")
    return {key: x for key, x in value.items() if x is not None}


def rows_inside(line: bytes) -> str | None:
    """Return where in the only object of a file its rows are, and the remedy; None if it has none.

    The text has FILE in the place of the file's name.
    """
    try:
        value = read_object(line)
    except RowError:
        return None
    for key, x in value.items():
        if isinstance(x, list) and x and all(isinstance(row, dict) for row in x):
            if key in ("messages", "conversations", "chosen", "rejected", "tools"):
                continue  # a row by itself
            return (
                f"holds one object, whose rows are under {key!r}; take them out: jq -c "
                f"'.\"{key}\"[]' FILE > rows.jsonl"
            )
    if len(value) > 1 and all(isinstance(x, list | dict) and len(x) > 1 for x in value.values()):
        return (
            f"holds columns ({', '.join(map(repr, [*value][:4]))}) and no rows; write it anew: "
            "python -c \"import pandas; pandas.read_json('FILE').to_json('rows.jsonl', "
            "orient='records', lines=True)\""
        )
    return None


def text_of(value: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    """Return the text that an object has under a key.

    Raises:
      RowError: it is no text, or empty.
    """
    found = value[key]
    if not isinstance(found, str):
        raise RowError(f'"{key}" is a JSON {json_type(found)}; it must be a string')
    if not found and not may_be_empty:
        raise RowError(f'"{key}" is empty')
    return found


def messages_of(value: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    """Return the messages that an object has under a key, each with the keys "role" and "content".
    A content is text, or an array of parts with text.

    Raises:
      RowError: they are no messages, or there are none.
    """
    found = value[key]
    if not isinstance(found, list) or not found:
        raise RowError(f'"{key}" is a JSON {json_type(found)}; it must be an array with messages')
    where = "message" if key == "messages" else f'of "{key}" message'
    messages = []
    for i, message in enumerate(found):
        if not isinstance(message, dict):
            raise RowError(f"{where} {i} is a JSON {json_type(message)}, no object")
        message = {key: x for key, x in message.items() if x is not None}
        if not isinstance(message.get("role"), str):
            raise RowError(f'{where} {i} has no "role" that is a string')
        named = f"{where} {i} of the {message['role']}"
        has_others = any(key in message for key in (*CALLS, *THOUGHTS))
        content = message.get("content", "" if has_others else None)
        if not isinstance(content, str | list):
            raise RowError(f'{named} has no "content" that is text')
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else json_type(part)
                raise RowError(
                    f'{named} has no "content" that is text: a part of it is {kind!r}; leave it out'
                )
        for key in WEIGHTS:
            if message.get(key, 1) not in (0, 1):
                raise RowError(
                    f'{named} has "{key}": {message[key]!r}; it must be 1, to be learned, or 0'
                )
        messages.append({"content": "", **message})
    return tuple(messages)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message, if the assistant wrote it, is to be learned."""
    return all(message.get(key, 1) for key in WEIGHTS)


def text_of_content(content: Any) -> str:
    """Return the text of a content: itself, or its parts together."""
    return "".join(x["text"] for x in content) if isinstance(content, list) else content or ""


def tools_of(value: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of an object; None if there are none.

    Raises:
      RowError: they are no array.
    """
    found = value.get("tools")
    if found is not None and not isinstance(found, list):
        raise RowError(f'"tools" is a JSON {json_type(found)}; it must be an array')
    return found or None


def json_type(value: Any) -> str:
    """Return what a value of JSON is, in a word."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
