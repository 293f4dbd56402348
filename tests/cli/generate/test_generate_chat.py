"""`zeroxla generate --chat`: conversations."""

from __future__ import annotations

import io
import json
import signal

import pytest
from tools.generate_command import LIKELIEST, copied, generate
from tools.quick import quick_compilation  # noqa: F401
from tools.text_models import numbers

from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.generate.drawing import AnswerTexts

pytestmark = pytest.mark.usefixtures("quick_compilation")


def converse(monkeypatch, *lines):
    """Let lines be typed, through a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_is_kept_until_it_is_new(folder_of, monkeypatch, capsys):
    asked, prompt = [], ChatTemplate.prompt

    def seen(self, messages, **options):
        asked.append([(message["role"], message["content"]) for message in messages])
        return prompt(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "prompt", seen)
    converse(monkeypatch, "t5", "", "t6", "/new", "t5")
    told = ["--chat", "--system", "t9", "--temperature", 0, "--max-new-tokens", 6]
    assert generate(folder_of("llama"), *told) == 0
    said = capsys.readouterr()
    first, second, third = said.out.splitlines()
    assert first == third != second
    begun = [("system", "t9"), ("user", "t5")]
    answered = [*begun, ("assistant", first), ("user", "t6")]
    assert asked[1:] == [begun, answered, begun]  # the first one tries the template
    assert "Chat template: zeroxla's own" in said.err


@pytest.mark.slow
def test_equals_messages_of_a_file(folder_of, monkeypatch, tmp_path, capsys):
    folder = copied(folder_of, "llama", tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %} t7"
    )
    converse(monkeypatch, "t5", "t6")
    told = ["--temperature", 0, "--max-new-tokens", 6]
    assert generate(folder, "--chat", *told) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert "Chat template: the model's own" in said.err
    messages = [{"role": "user", "content": "t5"}]
    rows = [{"messages": messages}]
    messages = [
        *messages,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "t6"},
    ]
    rows.append({"messages": messages})
    file, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert generate(folder, "--file", file, "--output", out, *told) == 0
    found = [json.loads(line)["response"] for line in out.read_text().splitlines()]
    assert found == [first, second]


@pytest.mark.slow
def test_a_full_context_is_said(folder_of, monkeypatch, capsys):
    converse(monkeypatch, " ".join(["t5"] * 70), "t5")
    assert generate(folder_of("llama"), "--chat", "--max-new-tokens", 4) == 0
    said = capsys.readouterr()
    assert "and the model's context is 64" in said.err
    assert "or begin a new conversation with /new" in said.err
    assert len(said.out.splitlines()) == 1


def test_ctrl_c_ends_an_answer_and_not_the_conversation(folder_of, monkeypatch, capsys):
    whole = AnswerTexts.add

    def add(self, item):
        found = whole(self, item)
        if self.rows[0].num_tokens == 3:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(AnswerTexts, "add", add)
    converse(monkeypatch, "t5", "t6")
    assert generate(folder_of("llama"), "--chat", *LIKELIEST) == 0
    assert [len(numbers(x)) for x in capsys.readouterr().out.splitlines()] == [3, 3]
