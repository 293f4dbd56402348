"""Turns rows in the forms of other programs into those that `row_kinds` reads.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}        (or "context", and "response")

The first form is ShareGPT's, the second one Alpaca's. Both become conversations. They may have
"system", a text, and Alpaca's "history", pairs of texts, as LLaMA-Factory reads them; and "chosen"
with "rejected" for an answer, which makes them preferences. Values that hold messages or tools may
be JSON as text, as tables have them.

Sources: the data formats in the documentation of LLaMA-Factory and of axolotl.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.row_values import json_type, text_of

FOREIGN_KEYS = (
    *("conversations", "conversation", "instruction", "input", "context", "output", "system"),
    *("history", "kto_tag", "label"),
)
"""The keys that are read besides those of `row_kinds`."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""The roles of ShareGPT's "from"."""
_CALLS = ("function_call", "tool_call")
_STRUCTURES = ("messages", "conversations", "conversation", "tools", "history")
"""Keys whose value may be JSON as text."""


def can_hold_rows(keys: Iterable[str]) -> bool:
    """Return whether a table with columns of these names can hold rows."""
    have = set(keys)
    return bool(
        have & {"messages", "conversations", "conversation", "text", "prompt", "instruction"}
        or have >= {"chosen", "rejected"}
    )


def no_columns(names: Iterable[str]) -> str:
    """Return what is wrong with a table whose columns hold no rows, and the remedy."""
    shown = ", ".join(map(repr, [*names][:8])) or "none"
    return (
        f"its columns are no rows to train on ({shown}); name them as docs/data.md says, such as "
        "prompt and response, messages, text, or instruction and output"
    )


def known_form(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in a form that `row_kinds` reads; a row that has one already as it is.

    Raises:
      RowError: a value is of the wrong kind, or a role is unknown.
    """
    row = {key: _parsed(x) if key in _STRUCTURES else x for key, x in value.items()}
    if row.get("tools") == "":
        del row["tools"]
    if "kto_tag" in row:
        row["label"] = row.pop("kto_tag")
    if _has_from(row.get("messages")):
        row["messages"] = _messages(row["messages"], "messages")
    if "messages" in row:
        return row
    for side in ("chosen", "rejected"):
        if _has_from(row.get(side)):
            row[side] = _messages(row[side], side)
    is_pair = "prompt" in row and ("response" in row or "completion" in row)
    if key := next((key for key in ("conversations", "conversation") if key in row), None):
        messages = _messages(row.pop(key), key)
    elif "instruction" in row and not is_pair:
        messages = _of_instruction(row)
    else:
        return row
    system = row.pop("system", None)
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    answers = [row.get(key) for key in ("chosen", "rejected")]
    if None not in answers:
        sides = [_answer(x, key) for x, key in zip(answers, ("chosen", "rejected"))]
        return {**row, "prompt": messages, "chosen": sides[0], "rejected": sides[1]}
    return {**row, "messages": messages}


def _of_instruction(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of Alpaca's keys, and take these out of the row."""
    asked = text_of(row, "instruction")
    added = next((key for key in ("input", "context") if row.get(key)), None)
    if added is not None:
        asked += "\n" + text_of(row, added)
    messages = []
    for i, turn in enumerate(row.pop("history", [])):
        if not isinstance(turn, list) or [*map(type, turn)] != [str, str]:
            raise RowError(
                f'"history" {i} must be an array of two texts: what was said, and answered'
            )
        messages += [_said("user", turn[0]), _said("assistant", turn[1])]
    messages.append(_said("user", asked))
    answer = next((key for key in ("output", "response") if key in row), None)
    if answer is not None:
        messages.append(_said("assistant", text_of(row, answer)))
    for key in ("instruction", "input", "context", "output", "response"):
        row.pop(key, None)
    return messages


def _messages(found: Any, key: str) -> list[dict[str, Any]]:
    """Return messages of ShareGPT as messages with "role" and "content"."""
    if not isinstance(found, list) or not found:
        raise RowError(f'"{key}" is a JSON {json_type(found)}; it must be an array with messages')
    return [_message(message, f"message {i}") for i, message in enumerate(found)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "from" not in message:
        return message
    rest = {key: x for key, x in message.items() if key not in ("from", "value")}
    said, content = message["from"], message.get("value")
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise RowError(f'{where} is "from" {said!r}; known are {", ".join(_ROLES)}')
    if said.lower() not in _CALLS:
        return {**rest, "role": role, "content": content}
    calls = _parsed(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(f'{where} is "from" {said!r}, and its value is no JSON with a "name"')
    made = [{"type": "function", "function": call} for call in calls]
    return {**rest, "role": role, "content": "", "tool_calls": made}


def _answer(found: Any, key: str) -> list[Any]:
    """Return an answer, a text or a message of either form or several, as messages."""
    if isinstance(found, str):
        return [_said("assistant", text_of({key: found}, key))]
    return _messages(found if isinstance(found, list) else [found], key)


def _has_from(found: Any) -> bool:
    return isinstance(found, list) and any(isinstance(x, dict) and "from" in x for x in found)


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _parsed(value: Any) -> Any:
    """Return the array or object that a text holds as JSON; another value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
