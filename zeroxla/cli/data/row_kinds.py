"""The kinds of rows that a model learns from: preferences, conversations, pairs and documents.

A row is a JSON object. Its keys say what it is:

    {"prompt": "...", "chosen": "...", "rejected": "..."}          a preference between texts
    {"prompt": [...], "chosen": [...], "rejected": [...]}          one between messages
    {"chosen": [...], "rejected": [...]}                           one between conversations
    {"messages": [{"role": "user", "content": "..."}, ...]}       a conversation
    {"prompt": "...", "response": "..."}  (or "completion")        a pair
    {"text": "..."}                                                a document

If a row has the keys of several kinds, the first of them in this order counts. Other keys are
ignored, and a key whose value is null counts as absent. What says that an answer is not to be
learned is never ignored: a message's "weight" of 0 is followed, a row's is refused, as "label" is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.foreign_rows import known_form
from zeroxla.cli.data.row_values import (
    is_learned,
    json_type,
    messages_of,
    read_object,
    text_of,
    text_of_content,
    tools_of,
)

LABELS = ("label", "kto_tag")
"""Keys of rows that say whether the answer is a good one, as files for KTO have them."""
KEYS = (
    *("chosen", "rejected", "messages", "tools", "prompt", "response", "completion", "text"),
    *("weight", *LABELS),
)
"""The keys that are read."""

Messages: TypeAlias = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in turn. The model learns the messages of the assistant whose weight is not 0.

    Attributes:
      messages: objects with "role", "content", and whatever else the chat template reads.
      tools: descriptions of tools, for the chat template; None if there are none.
      num_given: the number of messages at the beginning that are only given. Of the others the
        model learns those of the assistant.
    """

    messages: Messages
    tools: list[Any] | None = None
    num_given: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response that the model learns."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text, all of which the model learns."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, each with the prompt, of which one was preferred.

    Attributes:
      chosen, rejected: both are pairs, or both conversations that begin with the prompt's messages.
    """

    chosen: Pair | Conversation
    rejected: Pair | Conversation


TrainingRow: TypeAlias = Conversation | Pair | Document | Preference


def kind_of(row: TrainingRow) -> str:
    """Return the name of a row's kind: its class, and "ChatPreference" of a preference between
    conversations."""
    if isinstance(row, Preference) and isinstance(row.chosen, Conversation):
        return "ChatPreference"
    return type(row).__name__


def read_row(line: bytes) -> TrainingRow:
    """Return the row that a line of JSON holds.

    Raises:
      RowError: the line is no row; the text says why.
    """
    return row_of(known_form(read_object(line)))


def row_of(value: Mapping[str, Any]) -> TrainingRow:
    """Return the row that an object describes.

    Raises:
      RowError: it has none of the keys, or a value is of the wrong kind or empty.
    """
    if "chosen" in value and "rejected" in value:
        return _preference(value)
    if "messages" in value:
        _check_all_is_learned(value)
        conversation = conversation_of(value)
        if not (answers := [x for x in conversation.messages if x["role"] == "assistant"]):
            roles = ", ".join(dict.fromkeys(x["role"] for x in conversation.messages))
            raise RowError(
                f"no message is of the assistant, so there is nothing to learn (of: {roles})"
            )
        if not any(map(is_learned, answers)):
            raise RowError(
                "no message of the assistant is to be learned: each has a weight of 0; leave the "
                "row out"
            )
        return conversation
    answers = [key for key in ("response", "completion") if key in value]
    if "prompt" in value and answers:
        _check_all_is_learned(value)
        return Pair(text_of(value, "prompt", may_be_empty=True), text_of(value, answers[0]))
    if "text" in value:
        return Document(text_of(value, "text"))
    if one := [key for key in ("chosen", "rejected") if key in value]:
        other = "rejected" if one[0] == "chosen" else "chosen"
        raise RowError(f'the row has "{one[0]}" and no "{other}"')
    if "prompt" in value:
        raise RowError('the row has a "prompt", and neither "response" nor "completion"')
    keys = ", ".join(list(value)[:8]) or "none"
    raise RowError(
        'the row has none of "messages", "prompt" with "response", "text", and "chosen" with '
        f'"rejected"; its keys: {keys}'
    )


def _check_all_is_learned(value: Mapping[str, Any]) -> None:
    """Check that an object does not say of its answer that it is a bad one.

    Raises:
      RowError: it does, or has a key that says it of other rows.
    """
    for key in LABELS:
        label = value.get(key)
        if isinstance(label, bool | int) or str(label).lower() in ("true", "false"):
            raise RowError(
                f'the row has "{key}": {json.dumps(label)}, which says whether its answer is good '
                "(KTO's format). Training on such rows is not supported: keep the good ones "
                f'without "{key}", or make pairs with "chosen" and "rejected". Leave "{key}" out '
                "if it says something else"
            )
    if value.get("weight") == 0:
        raise RowError('the row has "weight": 0, so nothing of it is to be learned; leave it out')


def conversation_of(value: Mapping[str, Any]) -> Conversation:
    """Return the conversation in an object with the key "messages".

    Raises:
      RowError: a value is of the wrong kind, or empty.
    """
    return Conversation(messages_of(value, "messages"), tools_of(value))


def row_hash(row: TrainingRow) -> bytes:
    """Return 8 bytes of BLAKE2b of a row's content.

    Raises:
      RowError: the row has no UTF-8.
    """
    return _hash(_content(row))


def side_hash(row: TrainingRow) -> bytes:
    """Return the 8 bytes that decide whether a row is held out.

    For a preference they are a hash of its prompt, so that all pairs of responses to one prompt are
    on the same side. For other rows, and if the prompt is empty, they are `row_hash`.

    Raises:
      RowError: the row has no UTF-8.
    """
    if isinstance(row, Preference):
        asked = row.chosen
        if isinstance(asked, Conversation):
            return _hash({"messages": asked.messages[: asked.num_given], "tools": asked.tools})
        if asked.prompt:
            return _hash({"prompt": asked.prompt})
    return row_hash(row)


def _hash(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    try:
        return hashlib.blake2b(text.encode(), digest_size=8).digest()
    except UnicodeEncodeError as error:
        raise RowError("the row has half of a surrogate pair, which is no character") from error


def _content(row: TrainingRow) -> dict[str, Any]:
    if isinstance(row, Preference):
        return {"chosen": _content(row.chosen), "rejected": _content(row.rejected)}
    if isinstance(row, Conversation):
        given = {"given": row.num_given} if row.num_given else {}
        return {"messages": row.messages, "tools": row.tools, **given}
    if isinstance(row, Pair):
        return {"prompt": row.prompt, "response": row.response}
    return {"text": row.text}


def _preference(value: Mapping[str, Any]) -> Preference:
    """Return the preference in an object with the keys "chosen" and "rejected"."""
    kinds = [json_type(value[key]) for key in ("chosen", "rejected")]
    if kinds[0] != kinds[1]:
        raise RowError(
            f'"chosen" is a JSON {kinds[0]} and "rejected" a JSON {kinds[1]}; both must be '
            "strings, or both arrays with messages"
        )
    if value["chosen"] == value["rejected"]:
        raise RowError('"chosen" and "rejected" are equal, so that nothing is preferred')
    return _preference_of_messages(value) if kinds[0] == "array" else _preference_of_texts(value)


def _preference_of_messages(value: Mapping[str, Any]) -> Preference:
    given, answers = _given_and_answers(value)
    if given[-1]["role"] == "assistant":
        raise RowError("the last message before the answers is of the assistant, too")
    tools = tools_of(value)
    chosen, rejected = (Conversation((*given, *x), tools, len(given)) for x in answers)
    return Preference(chosen, rejected)


def _given_and_answers(value: Mapping[str, Any]) -> tuple[Messages, tuple[Messages, Messages]]:
    """Return the messages before the answers, and the messages of the chosen and of the rejected
    answer. Without a prompt the first ones are those that both conversations begin with."""
    chosen, rejected = messages_of(value, "chosen"), messages_of(value, "rejected")
    if isinstance(value.get("prompt"), list):
        for key, answer in (("chosen", chosen), ("rejected", rejected)):
            if answer[0]["role"] != "assistant":
                raise RowError(
                    f'the first message of "{key}" is of the {answer[0]["role"]}, not of the '
                    'assistant, who answers "prompt"; if it repeats the prompt, leave "prompt" out'
                )
        return messages_of(value, "prompt"), (chosen, rejected)
    pairs = enumerate(zip(chosen, rejected))
    number = next((i for i, (x, y) in pairs if x != y), min(len(chosen), len(rejected)))
    given, answers = chosen[:number], (chosen[number:], rejected[number:])
    if not given:
        raise RowError(
            'the messages of "chosen" and "rejected" have no common beginning, which would be the '
            "prompt"
        )
    if not all(answer and answer[0]["role"] == "assistant" for answer in answers):
        raise RowError(
            f'the first {number} messages of "chosen" and "rejected" are equal, and then they do '
            "not both go on with a message of the assistant"
        )
    if "prompt" in value and text_of(value, "prompt") not in (
        text_of_content(x["content"]) for x in given
    ):
        raise RowError(
            '"prompt" is a string that no message before the answers has as its content; leave it '
            "out, or give messages"
        )
    return given, answers


def _preference_of_texts(value: Mapping[str, Any]) -> Preference:
    chosen, rejected = text_of(value, "chosen"), text_of(value, "rejected")
    if "prompt" not in value:
        raise RowError('the row has "chosen" and "rejected" as strings, and no "prompt"')
    prompt = text_of(value, "prompt", may_be_empty=True)
    return Preference(Pair(prompt, chosen), Pair(prompt, rejected))
