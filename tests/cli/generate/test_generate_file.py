"""`zeroxla generate --file`: an answer to each row, with the tokens that Transformers recorded."""

from __future__ import annotations

import json

import pytest
from tools.generate_command import LIKELIEST, generate
from tools.quick import quick_compilation  # noqa: F401
from tools.text_models import greedy, numbers, words

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def rows(tmp_path):
    prompt, _ = greedy("llama")
    rows = [
        {"prompt": prompt, "id": 7, "none": None},
        {"messages": [{"role": "user", "content": "t5"}]},
        {"prompt": "t1 t2 t3", "é": ["ü"]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    return file, rows


def test_answers_stand_in_their_rows(folder_of, rows, tmp_path, capsys):
    """Three rows are answered in batches of two, so that the last batch is not full."""
    file, asked = rows
    _, want = greedy("llama")
    out = tmp_path / "new" / "answers.jsonl"
    told = ["--file", file, "--output", out, "--batch", 2, *LIKELIEST]
    assert generate(folder_of("llama"), *told, "--eos", want[4]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for row, answer in zip(asked, found, strict=True):
        added = {name: answer.pop(name) for name in ("response", "tokens", "finished")}
        assert answer == row
        assert len(numbers(added["response"])) == added["tokens"] - (added["finished"] == "eos")
        if row is asked[0]:
            assert added["response"] == " " + words(want[:4])
            assert (added["tokens"], added["finished"]) == (5, "eos")
    assert "chat template: zeroxla's own" in capsys.readouterr().err.lower()

    assert generate(folder_of("llama"), *told) == 2
    assert f"--output {out} is there already" in capsys.readouterr().err

    file.write_text(json.dumps({"prompt": "t1 " * 64}))
    out = tmp_path / "others.jsonl"
    assert generate(folder_of("llama"), "--file", file, "--output", out, *LIKELIEST) == 2
    assert "a prompt has 64 tokens, and the model's context is 64" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_an_answer_ends_at_a_text(folder_of, rows, tmp_path):
    """Quick tests in `test_generate_text.py` find such a text."""
    file, _ = rows
    _, want = greedy("llama")
    out = tmp_path / "answers.jsonl"
    told = ["--file", file, "--output", out, "--batch", 2, *LIKELIEST, "--eos", 0]
    stop = ["--stop", f"t{want[7]} t{want[8]}"]
    assert generate(folder_of("llama"), *told, *stop) == 0
    first = json.loads(out.read_text().splitlines()[0])
    assert first["response"] == f" {words(want[:7])} "
    assert (first["tokens"], first["finished"]) == (9, "stop")


def test_bad_rows_are_named(folder_of, rows, tmp_path, capsys):
    file, asked = rows
    bad = [
        '{"text": "t1"}',
        '{"prompt": 3}',
        '{"prompt": "t1", "response": "t2"}',
        '{"messages": [{"role": "assistant", "content": "t1"}]}',
        '{"prompt": "\\ud800"}',
        '{"messages": [{"role": "user", "content": "t6"}, {"role": "user", "content": "t5"}]}',
        "[1]",
    ]
    template = tmp_path / "own.jinja"
    refusal = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    template.write_text(refusal + "{{ messages[0].content }}")
    file.write_text("\n".join([file.read_text(), *bad]))
    out = tmp_path / "answers.jsonl"
    told = ["--file", file, "--output", out, "--chat-template", template, *LIKELIEST]
    assert generate(folder_of("llama"), *told) == 2
    said = capsys.readouterr().err
    assert f"Chat template: {template}" in said
    assert "7 of 10 rows are bad" in said
    assert not out.exists()
    for line, reason in enumerate(
        (
            'neither "prompt" nor "messages"; its keys: text',
            '"prompt" is a JSON number',
            'the row has "response", a key that its answer will have; rename it',
            'the last message has the role "assistant"',
            "half of a surrogate pair",
            "the chat template refuses the conversation: one only",
            "the row is a JSON array",
        ),
        start=6,
    ):
        assert f"{file}:{line}: " in said
        assert reason in said
    told += ["--max-bad-rows", 0.7, "--dtype", "bfloat16"]
    assert generate(folder_of("llama"), *told) == 0
    assert "computed in bfloat16" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == len(asked)
