"""Rows of ShareGPT and Alpaca mean what the same conversation in messages means."""

from __future__ import annotations

import json

import pytest

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.row_kinds import Conversation, Pair, Preference, read_row

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def row(**value):
    return read_row(json.dumps(value).encode())


def sharegpt(*messages):
    return [{"from": said, "value": text} for said, text in messages]


TWO = sharegpt(("human", "a"), ("gpt", "b"))
CALL = {"name": "add", "arguments": {"x": 1}}
SAME = [
    ({"conversations": TWO}, [user("a"), assistant("b")]),
    ({"conversations": TWO, "system": "Be brief."}, [SYSTEM, user("a"), assistant("b")]),
    (
        {"conversations": sharegpt(("system", "Be brief."), ("human", "a"), ("gpt", "b"))},
        [SYSTEM, user("a"), assistant("b")],
    ),
    (
        {"conversations": [SYSTEM, *TWO], "system": "not again"},
        [SYSTEM, user("a"), assistant("b")],
    ),
    ({"conversation": [user("a"), assistant("b")]}, [user("a"), assistant("b")]),
    ({"conversations": json.dumps(TWO)}, [user("a"), assistant("b")]),
    ({"messages": TWO, "id": 3}, [user("a"), assistant("b")]),
    (
        {"conversations": sharegpt(("Human", "a"), ("GPT", "b"), ("user", "c"), ("chatgpt", "d"))},
        [user("a"), assistant("b"), user("c"), assistant("d")],
    ),
    (
        {
            "conversations": sharegpt(
                *[("human", "a"), ("function_call", json.dumps(CALL)), ("observation", "2")],
                ("gpt", "b"),
            )
        },
        [
            user("a"),
            assistant("", tool_calls=[{"type": "function", "function": CALL}]),
            {"role": "tool", "content": "2"},
            assistant("b"),
        ],
    ),
    (
        {"conversations": [TWO[0], {**TWO[1], "weight": 1}]},
        [user("a"), assistant("b", weight=1)],
    ),
    ({"instruction": "a", "input": "", "output": "b"}, [user("a"), assistant("b")]),
    ({"instruction": "a", "output": "b", "text": "### a b"}, [user("a"), assistant("b")]),
    ({"instruction": "a", "input": "1", "output": "b"}, [user("a\n1"), assistant("b")]),
    ({"instruction": "a", "context": "1", "response": "b"}, [user("a\n1"), assistant("b")]),
    (
        {
            **{"instruction": "a", "input": None, "output": "b", "system": "Be brief."},
            "history": [["c", "d"], ["e", "f"]],
        },
        [SYSTEM, user("c"), assistant("d"), user("e"), assistant("f"), user("a"), assistant("b")],
    ),
]


@pytest.mark.parametrize(("value", "messages"), SAME)
def test_they_become_conversations(value, messages):
    assert row(**value) == row(messages=messages) == Conversation(tuple(messages))


def test_tools_may_be_json_as_text():
    tools = [{"name": "add", "parameters": {}}]
    assert row(conversations=TWO, tools=json.dumps(tools)).tools == tools
    assert row(conversations=TWO, tools="").tools is None


def test_a_pair_and_messages_of_other_keys_stay():
    assert row(prompt="a", response="b", instruction="c", output="d") == Pair("a", "b")
    both = row(messages=[user("a"), assistant("b")], conversations=TWO[:1], instruction="c")
    assert both.messages[0] == user("a")


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
        {
            "conversations": TWO[:1],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
        {
            "chosen": sharegpt(("human", "a"), ("gpt", "b")),
            "rejected": sharegpt(("human", "a"), ("gpt", "c")),
        },
    ],
)
def test_two_answers_become_a_preference(value):
    given = user("a")
    assert row(**value) == Preference(
        Conversation((given, assistant("b")), None, 1),
        Conversation((given, assistant("c")), None, 1),
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"conversations": "a"}, '"conversations" is a JSON string; it must be an array'),
        ({"conversations": []}, '"conversations" is a JSON array; it must be an array'),
        ({"conversations": sharegpt(("Bob", "a"))}, "message 0 is \"from\" 'Bob'; known are human"),
        ({"conversations": [{"from": 3, "value": "a"}]}, 'message 0 is "from" 3; known are'),
        ({"conversations": [{"from": "gpt"}]}, 'message 0 of the assistant has no "content"'),
        ({"conversations": TWO[:1]}, "no message is of the assistant"),
        (
            {"conversations": sharegpt(("function_call", "add 1"))},
            'its value is no JSON with a "na',
        ),
        ({"instruction": "a", "output": ""}, '"output" is empty'),
        ({"instruction": "a", "output": 1}, '"output" is a JSON number; it must be a string'),
        ({"instruction": ["a"], "output": "b"}, '"instruction" is a JSON array'),
        ({"instruction": "a", "input": "b"}, "no message is of the assistant"),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            '"history" 0 must be an array of',
        ),
        ({"question": "a", "answer": "b"}, "its keys: question, answer"),
    ],
)
def test_wrong_values_are_named(value, reason):
    with pytest.raises(RowError) as caught:
        row(**value)
    assert reason in str(caught.value)
