"""What a conversation teaches, in formats of public models, against writers in plain Python."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from tools.chat_formats import FORMATS, SPECIAL, Refused

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.chat_template import ChatTemplate

TEMPLATES = {name: ChatTemplate(form.template, SPECIAL) for name, form in FORMATS.items()}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"zone": "string"}}}]


def S(text):
    return {"role": "system", "content": text}


def U(text):
    return {"role": "user", "content": text}


def A(text, **others):
    return {"role": "assistant", "content": text, **others}


def T(text):
    return {"role": "tool", "content": text}


def call(*arguments, name="clock"):
    return [{"type": "function", "function": {"name": name, "arguments": x}} for x in arguments]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


SHAPES = {
    "one turn": [U("Hello"), A("Hi")],
    "several turns": [U("a"), A("b"), U("c"), A("d"), U("e"), A("f")],
    "a system prompt": [S("assistant"), U("user"), A("system")],
    "two system prompts": [S("x"), U("a"), S("y"), A("b")],
    "equal texts": [S("a"), U("a"), A("a"), U("a"), A("a")],
    "the assistant first": [A("b"), U("c"), A("d")],
    "the assistant after the system": [S("x"), A("b"), U("c"), A("d")],
    "two questions": [U("a"), U("b"), A("c")],
    "two answers": [U("a"), A("b"), A("c"), U("d"), A("e")],
    "an empty answer": [U("a"), A(""), U("b"), A("c")],
    "an empty answer at the end": [U("a"), A("b"), U("c"), A("")],
    "an empty question": [U(""), A("b")],
    "white space": [U(" a\n"), A(" \n b \n ")],
    "a question at the end": [U("a"), A("b"), U("c")],
    "marks of the template": [U("<|im_start|>assistant\n[INST]"), A("Assistant: <|im_end|>\n")],
    "a weight of 0": [U("a"), A("BAD", weight=0), U("b"), A("GOOD", weight=1)],
    "parts": [U(parts("a", " b")), A(parts("c ", "d"))],
    "thoughts": [U("a"), A("b", reasoning_content="why"), U("c"), A("d", reasoning_content="so")],
    "thoughts of the last": [U("a"), A("b"), U("c"), A("d", reasoning_content="\nso\n")],
    "thoughts in the content": [U("a"), A("<think>\nwhy\n</think>\n\nb"), U("c"), A("d")],
    "thoughts at the end": [U("a"), A("b"), U("c"), A("<think>\nwhy\n</think>\n\nd")],
    "thinking": [U("a"), A("b", thinking="why"), U("c"), A("d", thinking="so")],
    "a call": [U("time?"), A("", tool_calls=call({"zone": "UTC"})), T("noon"), A("It is noon.")],
    "a call with words": [U("time?"), A("wait", tool_calls=call({"zone": "UTC"})), T("1"), A("2")],
    "a call in text": [U("time?"), A("", tool_calls=call('{"zone":  "UTC"}')), T("1"), A("clock")],
    "two calls": [U("a"), A("", tool_calls=call({"a": 1}, {"b": [2]})), T("1"), T("2"), A("3")],
    "a call without arguments": [U("a"), A("", tool_calls=call({})), T("1"), A("2")],
    "a result at the end": [U("a"), A("", tool_calls=call({"zone": "x"})), T("1")],
}


def spoken(row, name):
    """The characters of a row in a format, and which of them are learned, as the writer says."""
    written = FORMATS[name].write(row)
    return "".join(x for x, _ in written), "".join(
        "^" * len(x) if y else " " * len(x) for x, y in written
    )


def found(row, name):
    text, spans = TEMPLATES[name].render(row["messages"], tools=row.get("tools"))
    marks = [" "] * len(text)
    for first, end in spans:
        marks[first:end] = "^" * (end - first)
    return text, "".join(marks)


def is_said(row, name):
    """Whether a format says all that others than the assistant do."""
    contents = [m["content"] for m in row["messages"] if m["role"] != "assistant"]
    texts = [[x] if isinstance(x, str) else [part["text"] for part in x] for x in contents]
    text = spoken(row, name)[0]
    return all(
        x.strip() in text or json.dumps(x) in text for x in itertools.chain.from_iterable(texts)
    )


def compare(row, name):
    try:
        want = spoken(row, name)
        refused = not is_said(row, name)
    except Refused:
        refused = True
    if refused:
        with pytest.raises(RowError, match=r"the chat template (refuses|does not|never)"):
            found(row, name)
    else:
        text, marks = found(row, name)
        assert text == want[0]
        assert f"{text!r}\n{marks}" == f"{text!r}\n{want[1]}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_is_what_the_assistant_wrote(name, shape):
    compare({"messages": SHAPES[shape]}, name)
    compare({"messages": SHAPES[shape], "tools": TOOLS}, name)


@pytest.mark.parametrize("name", FORMATS)
def test_of_random_conversations(name):
    draw = random.Random(name)
    texts = ["", " ", "a", "b", "assistant", "user\n", "<think>\nx\n</think>\n\ny", "</s>", "0"]
    for _ in range(60):
        said = [S(draw.choice(texts))] * draw.randint(0, 1)
        for _ in range(draw.randint(1, 6)):
            kind = draw.choice([U, U, A, A, A, T])
            message = kind(draw.choice(texts))
            if kind is A and draw.random() < 0.2:
                arguments = draw.choice([{}, {"a": "b"}, '{"assistant": ["user", 1]}'])
                message["tool_calls"] = call(arguments, name=draw.choice(["a", "user"]))
            if kind is A and draw.random() < 0.2:
                message["weight"] = draw.randint(0, 1)
            if kind is A and draw.random() < 0.1:
                message["reasoning_content"] = draw.choice(["a", "x\n"])
            said.append(message)
        compare({"messages": said, "tools": draw.choice([None, None, TOOLS])}, name)
