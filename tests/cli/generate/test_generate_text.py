"""Texts of answers: as they grow, where they end, and how a model's files say to draw them."""

from __future__ import annotations

import contextlib
import json
import random
from types import SimpleNamespace

import jax
import pytest
from tools.text_models import text_folder

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.data.prompt_rows import PromptRow
from zeroxla.cli.data.vocabulary import Bytes, Tokens
from zeroxla.cli.errors import RunFolderError
from zeroxla.cli.generate import answer_file
from zeroxla.cli.generate.answer_text import AnswerText, TokenText
from zeroxla.cli.generate.drawing import Drawing
from zeroxla.cli.generate.options import SamplingOptions
from zeroxla.cli.generate.output import GenerateOutput, InTurn
from zeroxla.cli.generate.settings import AnswerSettings
from zeroxla.cli.generate.source import TextSource
from zeroxla.hybrid.sampling import Sampling
from zeroxla.hybrid.token_stream import TokenStream

HALF = "\N{REPLACEMENT CHARACTER}"
PIECES = [*"né€😀ax ".encode(), 0xFF, 0xE2, 0x82, 0xF0]


class TestTokenText:
    def test_the_pieces_are_the_text(self):
        """Of any bytes, those that are no text included."""
        draw = random.Random(0)
        for _ in range(3000):
            tokens = draw.choices(PIECES, k=draw.randrange(12))
            text = TokenText(Bytes().decode)
            found = [text.add(token) for token in tokens]
            assert "".join([*found, text.rest()]) == Bytes().decode(tokens)

    def test_no_piece_is_half_a_character(self):
        text = TokenText(Bytes().decode)
        found = [text.add(token) for token in "né€😀x".encode()]
        assert found == ["n", "", "é", "", "", "€", "", "", "", "😀", "x"]

    def test_the_space_before_a_first_word_is_kept(self):
        """Some tokenizers leave it out at the beginning of a text."""

        def decode(tokens):
            return "".join(f" w{token}" for token in tokens)[1:]

        alone, after = TokenText(decode), TokenText(decode, [7])
        assert [alone.add(1), alone.add(2)] == ["w1", " w2"]
        assert [after.add(1), after.add(2)] == [" w1", " w2"]

    def test_byte_tokens_of_a_tokenizer(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
        tokenizer.add_tokens([f"<0x{i:02X}>" for i in range(256)])
        tokenizer.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        vocabulary = Tokens(tmp_path, {})
        text = TokenText(vocabulary.decode)
        found = [text.add(token) for token in "a😀é".encode()]
        assert found == ["a", "", "", "", "😀", "", "é"]


class TestAnswerText:
    @staticmethod
    def shown(text, tokens, **options):
        answer = AnswerText(Bytes().decode, **options)
        found = [answer.add(token, is_last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
        assert answer.text == "".join(found) == text
        return answer

    def test_ends_at_an_end_token(self):
        answer = self.shown("ab", b"ab\0cd", ends=[0])
        assert (answer.finished, answer.num_tokens) == ("eos", 3)

    def test_ends_at_its_length(self):
        answer = self.shown(f"a{HALF}", b"a\xe2\x82")
        assert (answer.finished, answer.num_tokens) == ("length", 3)

    def test_ends_at_a_stop_text_of_which_nothing_is_shown(self):
        answer = self.shown("a STO b ", b"a STO b STOPc", stops=["STOP", "never"])
        assert (answer.finished, answer.num_tokens) == ("stop", 12)

    def test_of_several_stop_texts_in_a_token_the_first_one_ends_it(self):
        answer = AnswerText(lambda tokens: "abXcY" * len(tokens), stops=["Y", "X"])
        assert answer.add(1, is_last=False) == "ab"

    def test_what_only_begins_like_a_stop_text_is_shown(self):
        assert self.shown("a ST", b"a ST", stops=["STOP"]).finished == "length"
        assert self.shown("a S", b"a S\0", stops=["STOP"], ends=[0]).finished == "eos"
        answer = AnswerText(Bytes().decode, stops=["STOP"])
        assert [answer.add(x, is_last=False) for x in b"aSTOb"] == ["a", "", "", "", "STOb"]
        answer.add(ord("S"), is_last=False)
        assert answer.end() == "S"
        assert answer.text == "aSTObS"


def test_texts_that_grow_together_are_shown_in_turn(capsys):
    shown = InTurn(GenerateOutput(), ["p", "q", "r"])
    shown.add(0, "0")
    shown.add(1, "1")
    shown.add(2, "2")
    shown.end([False, True, False])
    assert capsys.readouterr().out == "p0"
    shown.add(0, "\x1b[2J")  # which would clear the screen
    shown.end([True, True, False])
    shown.add(2, "2")
    shown.end([True, True, True])
    assert capsys.readouterr().out == f"{HALF}[2J\n\nq1\n\nr22"


class TestSettings:
    @pytest.fixture
    def folder(self, tmp_path):
        return text_folder(tmp_path / "llama", "llama")

    def settings(self, folder, told=None, tokenizer=None, **options):
        if told is not None:
            (folder / "generation_config.json").write_text(json.dumps(told))
        if tokenizer is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return AnswerSettings.of(SamplingOptions(**options), TextSource.of(folder))

    def test_without_a_file(self, folder):
        found = self.settings(folder)
        assert (found.sampling.temperature, found.sampling.top_k) == (0.7, None)
        assert (found.max_new_tokens, found.may_be_less) == (256, True)
        assert found.ends == (2,)  # of config.json

    def test_of_a_file_and_of_the_tokenizer(self, folder):
        told = {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "max_new_tokens": 40,
            "eos_token_id": [5, 6],
            "stop_strings": "t9",
            "repetition_penalty": 1.1,
            "num_beams": 1,
        }
        found = self.settings(folder, told, {"eos_token": {"content": "t8"}})
        sampling = found.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
        assert (found.max_new_tokens, found.ends, found.stops) == (40, (5, 6, 8), ("t9",))
        assert found.asked == ("repetition_penalty=1.1",)
        said = found.words(TextSource.of(folder).vocabulary)
        assert said == (
            "Sampling: temperature 0.6, top-k 20, top-p 0.95, seed 0; an answer ends after 40 "
            "tokens or at the context's end, or at 't5' or 't6' or 't8' or 't9'"
        )
        given = self.settings(
            folder, temperature=0, top_k=0, top_p=1.0, eos=(3,), stop=("x",), max_new_tokens=4
        )
        assert given.sampling.is_greedy
        assert given.sampling.top_k is None
        assert (given.ends, given.stops, given.max_new_tokens) == ((3,), ("x",), 4)

    def test_a_file_that_does_not_ask_for_sampling(self, folder):
        assert self.settings(folder, {"temperature": 0.6}).sampling.is_greedy
        assert self.settings(folder, {"do_sample": True}).sampling.temperature == 1

    @pytest.mark.parametrize(
        ("said", "dtype"),
        [
            ({"dtype": "bfloat16"}, "bfloat16"),
            ({"dtype": None, "torch_dtype": "float16"}, "float16"),
            ({"dtype": "float64"}, "float32"),
        ],
    )
    def test_the_dtype_is_that_of_the_config(self, folder, said, dtype):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **said}))
        assert TextSource.of(folder).dtype == dtype

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            ({"do_sample": True, "top_p": 3}, "top_p=3 must be above 0"),
            ({"do_sample": True, "temperature": "hot"}, "generation_config.json of"),
            ({"max_new_tokens": "many"}, "max_new_tokens='many'; give --max-new-tokens"),
            ({"eos_token_id": "end"}, "eos_token_id of .* is 'end', and no token"),
            ({"stop_strings": [3]}, r"stop_strings=\[3\], and no texts"),
            ([1], "holds no JSON object"),
        ],
    )
    def test_values_that_cannot_be_followed(self, folder, told, message):
        with pytest.raises(ValueError, match=message):
            self.settings(folder, told)

    def test_a_damaged_file(self, folder):
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"cannot read .*generation_config.json"):
            self.settings(folder)

    def test_an_end_that_the_model_does_not_know(self, folder):
        with pytest.raises(ValueError, match=r"the token 64 is to end an answer, .* 0 to 63"):
            self.settings(folder, {"eos_token_id": 64}).check_ends(64)

    def test_room(self, folder):
        found = self.settings(folder)
        assert found.room(10, 64) == 54
        assert found.room(10, 1000) == 256
        with pytest.raises(ValueError, match="no room for an answer; shorten the prompt"):
            found.room(64, 64)
        given = self.settings(folder, max_new_tokens=30)
        assert given.room(34, 64) == 30
        with pytest.raises(ValueError, match=r"--max-new-tokens 30; .* ask for 29 new ones"):
            given.room(35, 64)


class FakeEngine:
    """Draws nothing, and remembers what it was told."""

    max_length = 64

    def __init__(self):
        self.told = []

    def stream(self, state, prompts, **told):
        self.told.append(told)
        return TokenStream(item for item in ())


class TestDrawing:
    def drawing(self, **changed):
        usual = {
            **{"max_new_tokens": 40, "may_be_less": True, "ends": (0,), "stops": ("STOP",)},
            **{"sampling": Sampling(temperature=0.6, top_k=20, top_p=0.95), "seed": 3},
        }
        settings = AnswerSettings(**{**usual, **changed})
        engine = FakeEngine()
        return Drawing(engine=engine, state=None, vocabulary=Bytes(), settings=settings)

    def told(self, drawing, number=1):
        for _ in range(number):
            list(drawing.draw([[1, 2]], drawing.answers([[1, 2]], [False]), every=4))
        return drawing.engine.told

    def test_tells_the_engine_how_to_draw(self):
        (told,) = self.told(self.drawing())
        told.pop("key")
        assert told == {
            "max_new_tokens": 40,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "eos": (0,),
            "every": 4,
        }

    def test_each_request_has_a_key_that_follows_from_the_seed(self):
        drawings = (self.drawing(), self.drawing(), self.drawing(seed=4))
        keys = [
            [tuple(jax.random.key_data(told["key"]).tolist()) for told in self.told(drawing, 2)]
            for drawing in drawings
        ]
        assert keys[0] == keys[1]
        assert len({*keys[0], *keys[2]}) == 4

    @pytest.mark.parametrize(("drawn", "finished"), [(b"aSTOPb", "stop"), (b"a\0b", "eos")])
    def test_answers_end_at_the_texts_and_tokens_of_the_settings(self, drawn, finished):
        (answer,) = self.drawing().answers([[1]], [True]).rows
        for token in drawn:
            answer.add(token, is_last=False)
        assert (answer.text, answer.finished) == ("a", finished)


class TestPromptOfATemplate:
    def test_needs_no_turns(self):
        """A template may write earlier answers otherwise than the last one."""
        source = (
            "{% for m in messages %}{% if not loop.last or m.role == 'user' %}{{ m.content[:1] }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}"
        )
        messages = [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "cd"},
            {"role": "user", "content": "ef"},
        ]
        template = ChatTemplate(source, {})
        assert template.prompt(messages) == "ace>"

    def test_without_text(self):
        with pytest.raises(RowError, match="makes no text of the conversation"):
            ChatTemplate("", {}).prompt([{"role": "user", "content": ""}])

    def test_says_all_that_the_row_does(self):
        source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        with pytest.raises(RowError, match='content of message 0, whose role is "system"'):
            ChatTemplate(source, {}).prompt(messages)


class TestOfARun:
    def source(self, folder, **config):
        choice = SimpleNamespace(vocabulary=Bytes(), chat_template="its own")
        run = SimpleNamespace(config=config)
        return TextSource(folder=folder, choice=choice, run=run, model=None)

    def test_a_text_begins_as_the_rows_of_training_did(self, tmp_path):
        assert self.source(tmp_path, rows={}).encode("a") == [0, ord("a")]
        assert self.source(tmp_path, preferences={}).encode("a") == [0, ord("a")]
        assert self.source(tmp_path, rows={}).encode("") == [0]
        assert self.source(tmp_path, text={}).encode("a") == [ord("a")]

    def test_a_template_that_is_given_goes_before_the_runs_and_that_before_the_models(
        self, tmp_path
    ):
        source, said = self.source(tmp_path), []
        given = tmp_path / "given.jinja"
        given.write_text("given")
        assert source.chat_template(None, said.append).source == "its own"
        (tmp_path / "chat_template.jinja").write_text("kept")
        assert source.chat_template(None, said.append).source == "kept"
        assert source.chat_template(given, said.append).source == "given"
        places = ("the model's own", tmp_path / "chat_template.jinja", given)
        assert said == [f"Chat template: {place}" for place in places]


def test_an_answer_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answer_file, "append_whole", full)
    with contextlib.closing(answer_file.AnswerFile(tmp_path / "answers.jsonl")) as file:
        row = PromptRow("prompts.jsonl:3", {}, "a")
        with pytest.raises(RunFolderError, match=r"before the one to prompts\.jsonl:3 are there"):
            file.write(row, AnswerText(Bytes().decode))


@pytest.mark.parametrize("framed", [False, True])
def test_special_tokens_around_a_prompt(framed, tmp_path):
    """A tokenizer's own ones are added to a text of a folder, and left out of an answer's text."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = text_folder(tmp_path / "llama", "llama")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["t1"])
    if framed:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="t1 $A", special_tokens=[("t1", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    source = TextSource.of(folder)
    assert source.encode("t5 t6") == [*([1] if framed else []), 5, 6]
    assert source.vocabulary.decode([1, 5]) == "t1 t5"
    assert source.vocabulary.decode([1, 5], special=False) == "t5"
