"""Chat templates: what they write, and where the assistant's turns are found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.chat_template import (
    DEFAULT,
    ChatTemplate,
    find_template,
    read_template,
    template_of,
)
from zeroxla.cli.data.row_encoder import RowEncoder
from zeroxla.cli.data.row_kinds import Conversation
from zeroxla.cli.data.vocabulary import Bytes, Spans, Tokens

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
USER, ANSWER = MESSAGES[1:3]
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "[assistant]{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n\n"
    "{% else %}[{{ message.role }}]{{ message.content }}\n{% endif %}"
    "{% endfor %}"
)
FORGETS = (  # as templates do that drop the thoughts of earlier turns
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.role != 'assistant' or loop.last %}(thought){% endif %}{{ message.content }};"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def turns(source, messages=MESSAGES, **special):
    text, spans = ChatTemplate(source, {"eos_token": "</s>", **special}).render(messages)
    return [text[first:end] for first, end in spans]


class TestTurns:
    @pytest.mark.smoke
    def test_between_marks(self):
        assert turns(MARKED) == ["Hi</s>", "4</s>"]

    def test_without_marks_they_are_what_a_message_adds_to_the_prompt_for_it(self):
        assert turns(PLAIN) == ["Hi</s>\n", "4</s>\n"]

    def test_a_conversation_that_the_assistant_begins(self):
        assert turns(PLAIN, MESSAGES[2:4], bos_token="<s>") == ["Hi</s>\n"]

    def test_marks_leave_the_text_as_it_is(self):
        text = ChatTemplate(MARKED, {"eos_token": "</s>"}).render(MESSAGES).text
        assert text == (
            "[system]Be kind.\n[user]Hello\n[assistant]Hi</s>\n[user]2 + 2?\n[assistant]4</s>\n"
        )

    def test_of_a_template_that_writes_earlier_messages_otherwise(self):
        assert turns(FORGETS) == ["Hi;", "(thought)4;"]
        assert turns(FORGETS, MESSAGES[1:3]) == ["(thought)Hi;"]

    def test_of_a_prompt_that_begins_a_thought(self):
        source = (
            "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}<think>\n{{ m.thinking }}\n"
            "</think>{% endif %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
        )
        thought = "<think>\nwhy\n</think>Hi"
        messages = [USER, {**ANSWER, "content": thought}, USER, ANSWER, USER]
        assert turns(source, [*messages, {**ANSWER, "thinking": "so"}]) == [
            thought,  # a content is learned whole
            "Hi",
            "so\n</think>Hi",
        ]

    def test_that_cannot_be_found(self):
        pairs = (
            "{% for a, b in messages | batch(2) %}{{ a.content ~ ':' ~ b.content }};{% endfor %}"
        )
        with pytest.raises(RowError, match=r"message 1 cannot be found.*\{% generation %\}"):
            turns(pairs, MESSAGES[1:])
        mixed = (
            "{% for m in messages %}{{ m.content }}"
            "{% if m.role == 'assistant' %} to {{ messages[0].content }}{% endif %};{% endfor %}"
        )
        with pytest.raises(RowError, match=r"writes content of something else .* message 2;"):
            turns(mixed)

    @pytest.mark.parametrize(
        ("end", "learned"),
        [
            ("{% if add_generation_prompt %}[assistant]{% else %}</s>{% endif %}", "4</s>"),
            ("[assistant]", "4"),
            ("{{ messages[0].content }}", "4"),
        ],
        ids=["an end", "the prompt for an answer, always", "a reminder"],
    )
    def test_with_what_ends_a_conversation(self, end, learned):
        source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + end
        assert turns(source, MESSAGES[1:]) == ["Hi", learned]

    @pytest.mark.parametrize(
        ("weights", "learned"),
        [
            ({"weight": 0}, ["4</s>"]),
            ({"weight": 1.0}, ["Hi</s>", "4</s>"]),
            ({"train": False}, ["4</s>"]),
            ({"training": True}, ["Hi</s>", "4</s>"]),
        ],
    )
    @pytest.mark.parametrize("source", [MARKED, PLAIN], ids=["marked", "plain"])
    def test_of_messages_that_are_not_to_be_learned(self, source, weights, learned):
        messages = [*MESSAGES[:2], {**MESSAGES[2], **weights}, *MESSAGES[3:]]
        assert [x.rstrip("\n") for x in turns(source, messages)] == learned

    def test_in_marks_that_are_around_no_message(self):
        source = "{% for m in messages %}{{ m.content }}{% endfor %}"
        source = "{% generation %}" + source + "{% endgeneration %}"
        assert turns(source) == ["Be kind.HelloHi2 + 2?4"]
        messages = [{"role": "assistant", "content": "no", "weight": 0}, *MESSAGES]
        with pytest.raises(RowError, match=r"which message its \{% generation %\} is of"):
            turns(source, messages)

    def test_the_plain_template(self):
        template = ChatTemplate(DEFAULT, {"bos_token": "<s>", "eos_token": "</s>"})
        text, spans = template.render(MESSAGES)
        assert text == (
            "<s><|system|>\nBe kind.\n<|user|>\nHello\n<|assistant|>\nHi</s>\n"
            "<|user|>\n2 + 2?\n<|assistant|>\n4</s>\n"
        )
        assert [text[a:b] for a, b in spans] == ["Hi</s>", "4</s>"]
        asked = template.prompt(MESSAGES[:2])
        assert text.startswith(asked)
        assert asked.endswith("<|assistant|>\n")


class TestEnvironment:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{{ messages | tojson }}", json.dumps(MESSAGES[:1])),
            ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
            ("{{ strftime_now('%d %b %Y') }}", "01 Jan 2025"),
            ("{% for m in messages %}\n  {% break %}\n{% endfor %}\nend", "end"),
            ("  {% if tools %}\n{{ tools[0] }}\n  {% endif %}\n", "search\n"),
            ("{{ bos_token }}|{{ eos_token }}", "|"),
            ("{{ messages[0].get('content').strip('.').split(' ')[-1] }}", "kind"),
        ],
    )
    def test_has_what_templates_use(self, source, text):
        template = ChatTemplate(source + "{{ tools[0] }}{{ messages[0].content }}", {})
        found = template.render(MESSAGES[:1], tools=["search"]).text
        assert found == text + "searchBe kind."

    def test_a_template_that_refuses(self):
        source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        with pytest.raises(RowError, match=r"the chat template refuses .*: user first"):
            ChatTemplate(source, {}).render(MESSAGES)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages[0].update({'role': 'user'}) }}",
            "{{ messages[0].content + 1 }}",
        ],
    )
    def test_it_is_a_sandbox(self, source):
        with pytest.raises(RowError, match="the chat template refuses"):
            ChatTemplate(source, {}).render(MESSAGES)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 1 / (messages | length - 5) }}",
            "{{ '{1}'.format(messages[0].content) }}",
            "{{ range(10 ** 6) | list }}",
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        ],
        ids=["division", "format", "range", "recursion"],
    )
    def test_whatever_it_stumbles_over_is_a_bad_row(self, source):
        with pytest.raises(RowError, match="the chat template refuses"):
            ChatTemplate(source, {}).render(MESSAGES)

    def test_an_error_of_syntax(self):
        with pytest.raises(ValueError, match=r"no Jinja2 \(line 2: "):
            ChatTemplate("\n{% for %}", {})


class TestFolders:
    def write(self, folder, config=None, template=None):
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    def test_a_file_goes_before_the_config(self, tmp_path):
        assert find_template(tmp_path) is None
        assert find_template(self.write(tmp_path, {"chat_template": "one"})) == "one"
        assert find_template(self.write(tmp_path, template="two")) == "two"

    def test_several_need_one_that_is_the_default(self, tmp_path):
        named = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
        found = find_template(self.write(tmp_path, {"chat_template": named}))
        assert found == {"tool_use": "1", "default": "2"}
        self.write(tmp_path, {"chat_template": named[:1]})
        with pytest.raises(ValueError, match="templates named 'tool_use' and none named"):
            find_template(tmp_path)

    def test_several_in_files_are_written_and_read_again(self, tmp_path):
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("1")
        with pytest.raises(ValueError, match="templates named 'tool_use' and none named"):
            find_template(tmp_path)
        found = find_template(self.write(tmp_path, template="2"))
        assert found == {"tool_use": "1", "default": "2"}
        (tmp_path / "run").mkdir()
        ChatTemplate(found, {}).write(tmp_path / "run")
        assert read_template(tmp_path / "run" / "chat_template.jinja") == found

    def test_of_a_processor(self, tmp_path):
        (tmp_path / "chat_template.json").write_text('{"chat_template": "one"}')
        assert find_template(tmp_path) == "one"
        assert find_template(self.write(tmp_path, {"chat_template": "two"})) == "two"

    def test_rows_with_tools_take_the_one_for_them(self):
        source = "{% for m in messages %}{{ m.content }}{% endfor %}"
        template = ChatTemplate({"default": source, "tool_use": "{{ tools[0] }}:" + source}, {})
        assert template.render(MESSAGES[1:3]).text == "HelloHi"
        assert template.render(MESSAGES[1:3], tools=["search"]).text == "search:HelloHi"
        assert template.prompt(MESSAGES[1:2], tools=["search"]) == "search:Hello"

    def test_special_tokens_are_known(self, tmp_path):
        config = {
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "unk_token": "?",
        }
        assert template_of(self.write(tmp_path, config)).render([]).text == "<s></s>?"

    def test_without_a_template_the_plain_one(self, tmp_path):
        assert template_of(tmp_path).source == DEFAULT

    def test_a_damaged_config(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"cannot read .*tokenizer_config\.json"):
            find_template(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ValueError, match="holds no JSON object"):
            find_template(tmp_path)


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "é"}}}
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} ARGUMENTS>{% endfor %};{% endfor %}"
)


def said(source, *messages, **options):
    return ChatTemplate(source, {}).render(messages, **options)


class TestForms:
    """A template may take one of the forms only in which rows say the same."""

    @pytest.mark.parametrize(
        ("written", "text"),
        [
            ("{{ c.function.arguments | tojson }}", '{"zone": "é"}'),
            ("{{ '`' + c.function.arguments + '`' }}", '`{"zone": "é"}`'),
            ("{{ c.function.arguments }}", '{"zone": "é"}'),
            ("{{ c.function.arguments.zone }}", "é"),
        ],
    )
    def test_of_arguments_are_objects_or_json_text(self, written, text):
        source = CALLS.replace("ARGUMENTS", written)
        function = CALL["function"]
        as_text = {**CALL, "function": {**function, "arguments": json.dumps({"zone": "é"})}}
        for call in (CALL, as_text):
            row = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            found = said(source, *row).text.replace("\\u00e9", "é")
            assert found == f"user:Hello;assistant:<clock {text}>;"

    def test_text_that_is_no_json_stays(self):
        call = {"function": {"name": "python", "arguments": "print(1)"}}
        source = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
        found = said(source, USER, {**ANSWER, "tool_calls": [call]}).text
        assert found.endswith("Hi<python print(1)>;")

    @pytest.mark.parametrize(
        "source",
        [
            "{% for m in messages %}{{ m.content + ';' }}{% endfor %}",
            "{% for m in messages %}{{ m.content }};{% endfor %}",
            "{% for m in messages %}{% for x in m.content %}{% if x['type'] == 'text' %}"
            "{{ x['text'] }}{% endif %}{% endfor %};{% endfor %}",
            "{% for m in messages %}{{ m.content | map(attribute='text') | join }};{% endfor %}",
        ],
        ids=["text", "text as it is", "parts", "parts joined"],
    )
    def test_of_contents_are_text_or_parts(self, source):
        parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
        for user in (USER, {**USER, "content": parts}):
            text, spans = said(source, user, {**ANSWER, "content": "Hi[0]"})
            assert text == "Hello;Hi[0];"
            assert spans == [(6, 12)]


class TestLeftOut:
    """What a row says and the template does not write makes a bad row."""

    CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ({"tool_calls": [CALL]}, '"tool_calls", and .* not write the name of call 0'),
            ({"function_call": CALL["function"]}, '"function_call", and .* the name of call 0'),
            ({"reasoning_content": "why"}, '"reasoning_content", which the chat template never'),
            ({"thinking": "why"}, 'message 1 of the assistant has "thinking", which the chat'),
        ],
    )
    def test_calls_and_thoughts(self, message, reason):
        for source in (self.CHATML, DEFAULT):
            with pytest.raises(RowError, match=reason):
                said(source, USER, {**ANSWER, **message})

    def test_a_part_of_the_calls(self):
        row = USER, {**ANSWER, "tool_calls": [CALL, CALL]}
        names = CALLS.replace("ARGUMENTS", "")
        with pytest.raises(RowError, match="not write the arguments of call 0"):
            said(names, *row)
        first = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
        with pytest.raises(RowError, match="not write the name of call 1"):
            said(first.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"), *row)

    def test_tools(self):
        for source in (self.CHATML, DEFAULT, "{{ tools | length }}" + self.CHATML):
            with pytest.raises(RowError, match='has "tools", and the chat template does not write'):
                said(source, USER, ANSWER, tools=[{"name": "clock"}])
            with pytest.raises(RowError, match='has "tools"'):
                ChatTemplate(source, {}).prompt([USER], tools=[{"name": "clock"}])

    @pytest.mark.parametrize("role", ["system", "tool"])
    def test_a_role(self, role):
        source = self.CHATML.replace("messages %}", f"messages if m.role != '{role}' %}}")
        row = [{"role": role, "content": "Hi"}, USER, ANSWER]
        with pytest.raises(RowError, match=f'content of message 0, whose role is "{role}"'):
            said(source, *row)
        with pytest.raises(RowError, match=f'whose role is "{role}"'):
            ChatTemplate(source, {}).prompt(row[:2])

    def test_an_answer(self):
        source = self.CHATML.replace("m.content", "m.content.split('</think>')[-1]")
        thought = {**ANSWER, "content": "<think>why</think>"}
        with pytest.raises(RowError, match='content of message 1, whose role is "assistant"'):
            said(source, USER, thought)
        _, spans = said(source, USER, {**thought, "weight": 0}, USER, ANSWER)
        assert len(spans) == 1

    def test_the_name_of_a_call_in_its_result_is_no_call(self):
        source = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
            "{% if m.role == 'tool' %}{% set call = messages[loop.index0 - 1].tool_calls[0] %}"
            " of {{ call.function.name }}{% endif %}{% endfor %}"
        )
        row = USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}
        with pytest.raises(RowError, match="not write the name of call 0"):
            said(source, *row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello there, hello you"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class TestTokens:
    """Which tokens count, by a tokenizer's offsets."""

    def counted(self, vocabulary, source, messages, length=200):
        template = ChatTemplate(source, vocabulary.special)
        encoder = RowEncoder(vocabulary=vocabulary, template=template, length=length)
        (row,) = encoder.encode([Conversation(tuple(messages))])
        return row, vocabulary.decode(row.tokens_T[row.counted_T].tolist())

    def test_those_of_the_assistants_turns(self, folder):
        vocabulary = Tokens(folder, {"bos_token_id": 0, "eos_token_id": [1, 0]})
        assert vocabulary.special == {"bos_token": "<s>", "eos_token": "</s>"}
        messages = [
            {"role": "user", "content": "hello 日本 😀"},
            {"role": "assistant", "content": "Hello there, 日本 😀é"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"},
        ]
        row, text = self.counted(vocabulary, DEFAULT, messages)
        assert text == "Hello there, 日本 😀é</s>you</s>"
        assert row.tokens_T[0] == 0
        assert len(row.tokens_T) < len(vocabulary.decode(row.tokens_T.tolist()).encode())

    def test_bytes_of_a_character_belong_to_it(self):
        messages = [{"role": "user", "content": "日"}, {"role": "assistant", "content": "本é"}]
        assert self.counted(Bytes(), DEFAULT, messages)[1] == "本é\0"

    def test_a_token_across_the_border_counts(self):
        class Pieces(Bytes):
            """Tokens of three characters."""

            def encode_spans(self, texts):
                (text,) = texts
                starts_T = np.arange(0, len(text), 3)
                return [Spans(starts_T, np.stack([starts_T, starts_T + 3], axis=1))]

        source = "{% for m in messages %}{{ m.content }}{% endfor %}"
        messages = [
            *({"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efg"}),
            *({"role": "user", "content": "hijklm"}, {"role": "assistant", "content": "n"}),
        ]
        row, _ = self.counted(Pieces(), source, messages)
        # abc d|ef g|hi jkl m|n
        assert row.counted_T.tolist() == [False, True, True, False, True]

    def test_nothing_to_learn_within_the_length_is_a_bad_row(self):
        template = ChatTemplate(DEFAULT, Bytes.special)
        encoder = RowEncoder(vocabulary=Bytes(), template=template, length=16)
        (error,) = encoder.encode([Conversation(tuple(MESSAGES))])
        assert isinstance(error, RowError)
        assert "the first 17 of its 87 bytes hold nothing to learn" in str(error)
