"""Chat templates: what they write, and where the assistant's turns are found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.chat_template import DEFAULT, ChatTemplate, find_template, template_of
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

    def test_without_marks_they_are_what_a_message_adds(self):
        assert turns(PLAIN) == ["Hi</s>\n", "4</s>\n"]

    def test_a_conversation_that_the_assistant_begins(self):
        assert turns(PLAIN, MESSAGES[2:4]) == ["[assistant]Hi</s>\n"]

    def test_marks_leave_the_text_as_it_is(self):
        text = ChatTemplate(MARKED, {"eos_token": "</s>"}).render(MESSAGES).text
        assert text == (
            "[system]Be kind.\n[user]Hello\n[assistant]Hi</s>\n[user]2 + 2?\n[assistant]4</s>\n"
        )

    def test_of_a_template_that_writes_earlier_messages_otherwise(self):
        with pytest.raises(RowError, match=r"message 2 otherwise.*\{% generation %\}"):
            turns(FORGETS)
        assert turns(FORGETS, MESSAGES[1:3]) == ["(thought)Hi;"]

    def test_the_plain_template(self):
        template = ChatTemplate(DEFAULT, {"bos_token": "<s>", "eos_token": "</s>"})
        text, spans = template.render(MESSAGES)
        assert text == (
            "<s><|system|>\nBe kind.\n<|user|>\nHello\n<|assistant|>\nHi</s>\n"
            "<|user|>\n2 + 2?\n<|assistant|>\n4</s>\n"
        )
        assert [text[a:b] for a, b in spans] == ["Hi</s>", "4</s>"]
        asked = template.render(MESSAGES[:2], add_generation_prompt=True).text
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
        template = ChatTemplate(source, {})
        assert template.render(MESSAGES[:1], tools=["search"]).text == text

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

    def test_of_several_the_default(self, tmp_path):
        named = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
        assert find_template(self.write(tmp_path, {"chat_template": named})) == "2"
        self.write(tmp_path, {"chat_template": named[:1]})
        with pytest.raises(ValueError, match="templates named 'tool_use' and none named"):
            find_template(tmp_path)

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
