"""`zeroxla generate`, run as a user runs it, on models whose tokens Transformers recorded."""

from __future__ import annotations

import io
import json
import shutil

import jax
import numpy as np
import pytest
from tools.families import DECODERS
from tools.lora import with_random_b
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.text_models import greedy, numbers, text_folder, words

import zeroxla
from zeroxla.cli.generate.weights import Weights
from zeroxla.cli.main import main
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")

LIKELIEST = ("--temperature", 0, "--max-new-tokens", 12)


def generate(*arguments):
    """Run the command on the devices of the tests; return the exit status."""
    return main(["generate", *map(str, arguments), "--devices-per-node=8"])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders of models by their family, made when asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = text_folder(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return get


def copied(folder_of, name, tmp_path, **keys):
    """Return a copy of a folder, with other keys in its config."""
    folder = shutil.copytree(folder_of(name), tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def converse(monkeypatch, *lines):
    """Let lines be typed, through a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


QUICK = [("llama", 2, "float32")]
SLOW = [
    *((name, 2, "float32") for name in DECODERS if name != "llama"),
    ("llama", 1, "float32"),
    ("gpt2", 4, "float32"),
]


@pytest.mark.parametrize(("name", "tensor", "weights"), thinned(QUICK, slow=SLOW, rows=True))
def test_texts_are_continued_as_by_transformers(folder_of, name, tensor, weights, tmp_path, capsys):
    """And shown one after another, each after its prompt."""
    prompt, want = greedy(name)
    folder = copied(folder_of, name, tmp_path, eos_token_id=None)
    told = ["--prompt", prompt, "--prompt", "t1 t2", "--tensor", tensor, "--weights", weights]
    assert generate(folder, *told, *LIKELIEST) == 0
    said = capsys.readouterr()
    first, second = said.out.removesuffix("\n").split("\n\n")
    assert first == f"{prompt} {words(want)}"
    assert second.startswith("t1 t2 t")
    assert len(numbers(second)) == 14
    assert f"tensor={tensor}" in said.err
    assert "Sampling: the likeliest token each time; an answer ends after 12 tokens\n" in said.err
    assert "24 tokens, the first after" in said.err
    assert "tokens/s" in said.err


class TestFile:
    @pytest.fixture
    def rows(self, tmp_path):
        prompt, _ = greedy("llama")
        rows = [
            {"prompt": prompt, "id": 7, "none": None},
            {"messages": [{"role": "user", "content": "t5"}]},
            {"prompt": "t1 t2 t3", "é": ["ü"]},
        ]
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n\n".join(json.dumps(row) for row in rows))
        return file, rows

    def test_answers_stand_in_their_rows(self, folder_of, rows, tmp_path, capsys):
        """In batches, of which the last one is not full."""
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

    @pytest.mark.slow
    def test_an_answer_ends_at_a_text(self, folder_of, rows, tmp_path):
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

    def test_bad_rows_are_named(self, folder_of, rows, tmp_path, capsys):
        file, asked = rows
        bad = [
            '{"text": "t1"}',
            '{"prompt": 3}',
            '{"prompt": "t1", "response": "t2"}',
            '{"messages": [{"role": "assistant", "content": "t1"}]}',
            '{"prompt": "\\ud800"}',
            "[1]",
        ]
        file.write_text("\n".join([file.read_text(), *bad]))
        out = tmp_path / "answers.jsonl"
        told = ["--file", file, "--output", out, *LIKELIEST]
        assert generate(folder_of("llama"), *told) == 2
        said = capsys.readouterr().err
        assert "6 of 9 rows are bad" in said
        assert not out.exists()
        for line, reason in enumerate(
            (
                'neither "prompt" nor "messages"; its keys: text',
                '"prompt" is a JSON number',
                'the row has "response", a key that its answer will have; rename it',
                "the last message is of the assistant",
                "half of a surrogate pair",
                "the row is a JSON array",
            ),
            start=6,
        ):
            assert f"{file}:{line}: " in said
            assert reason in said
        assert generate(folder_of("llama"), *told, "--max-bad-rows", 0.7) == 0
        assert len(out.read_text().splitlines()) == len(asked)


class TestChat:
    def test_a_conversation_is_kept_until_it_is_new(self, folder_of, monkeypatch, capsys):
        converse(monkeypatch, "t5", "", "t6", "/new", "t5")
        told = ["--chat", "--system", "t9", "--temperature", 0, "--max-new-tokens", 6]
        assert generate(folder_of("llama"), *told) == 0
        said = capsys.readouterr()
        first, second, third = said.out.splitlines()
        assert first == third != second
        assert "Chat template: zeroxla's own" in said.err
        # As the same messages from a file.

    @pytest.mark.slow
    def test_equals_messages_of_a_file(self, folder_of, monkeypatch, tmp_path, capsys):
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
    def test_a_full_context_is_said(self, folder_of, monkeypatch, capsys):
        converse(monkeypatch, " ".join(["t5"] * 70), "t5")
        assert generate(folder_of("llama"), "--chat", "--max-new-tokens", 4) == 0
        said = capsys.readouterr()
        assert "and the model's context is 64" in said.err
        assert "or begin a new conversation with /new" in said.err
        assert len(said.out.splitlines()) == 1

    def test_ctrl_c_ends_an_answer_and_not_the_conversation(self, folder_of, monkeypatch, capsys):
        import signal

        from zeroxla.cli.generate.drawing import AnswerTexts

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


class TestWeights:
    @pytest.mark.parametrize("form", thinned(["int4"], slow=["int8"]))
    def test_in_few_bits_are_those_of_a_quantized_base(self, folder_of, form, tmp_path, capsys):
        """The first token's probabilities are near; and nothing but the parameters is held."""
        folder = copied(folder_of, "gemma2", tmp_path)
        prompt, _ = greedy("gemma2")
        assert generate(folder, "--prompt", prompt, "--weights", form, *LIKELIEST) == 0
        said = capsys.readouterr()
        assert f"stored as {form}" in said.err
        assert len(numbers(said.out)) == 6 + 12

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DECODERS)
    def test_of_every_family_can_be_stored_in_few_bits(self, folder_of, name, capsys):
        assert generate(folder_of(name), "--prompt", "t1", "--weights=int8", *LIKELIEST) == 0
        assert "stored as int8" in capsys.readouterr().err

    @pytest.mark.slow
    def test_are_all_that_a_state_holds(self, folder_of, monkeypatch, capsys):
        read, states = Weights.read, []

        def kept(self, report):
            states.append(read(self, report))
            return states[0]

        monkeypatch.setattr(Weights, "read", kept)
        assert generate(folder_of("llama"), "--prompt", "t1", *LIKELIEST) == 0
        assert not jax.tree.leaves(states[0].opt_state)

    @pytest.mark.parametrize("form", thinned(["float32"], slow=["int8"]))
    def test_with_an_adapter_of_peft(self, folder_of, form, tmp_path, capsys):
        base, adapter = folder_of("llama"), tmp_path / "adapter"
        model = zeroxla.lora(from_hugging_face(base), targets="(q|v)_proj/kernel", rank=2)
        step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1))
        batch = {"tokens": np.zeros((8, 9), np.int32)}
        step.abstract_state(batch)
        state = zeroxla.from_pretrained(model, base, step)
        params = jax.tree.map(lambda x: 3 * x, with_random_b(zeroxla.full_params(state)))
        params = {**params, "base": zeroxla.full_params(state)["base"]}
        state = step.init_from(params, jax.random.key(0))
        zeroxla.export_adapter(state, adapter, model=model)
        engine = zeroxla.HybridEngine(step)
        prompt, plain = greedy("llama")
        want = engine.generate(
            state, [numbers(prompt)], key=jax.random.key(0), max_new_tokens=12, temperature=0
        )
        told = ["--prompt", prompt, "--adapter", adapter, "--weights", form, "--eos", 0]
        assert generate(base, *told, *LIKELIEST) == 0
        found = numbers(capsys.readouterr().out)[6:]
        assert plain != want.tokens[0].tolist()
        if form == "float32":
            assert found == want.tokens[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LLAMA"], "no prompt: give one of --prompt TEXT, --file FILE and --chat"),
        (["LLAMA", "--prompt", "t1", "--chat"], "--prompt and --chat: give one of"),
        (["LLAMA", "--file", "x.jsonl"], "--file x.jsonl: give --output too"),
        (["LLAMA", "--prompt", "t1", "--output", "x"], "--output: without effect beside --prompt"),
        (["LLAMA", "--prompt", "t1", "--system", "t"], "--system: without effect beside --prompt"),
        (["LLAMA", "--prompt", "t1", "--chat-template", "t"], "--chat-template t: without effect"),
        (["LLAMA", "--prompt", "t1", "--temperature", "-1"], "--temperature -1.0 must be at least"),
        (["LLAMA", "--prompt", "t1", "--top-p", "0"], "--top-p 0.0 must be above 0"),
        (["LLAMA", "--prompt", "t1", "--stop", ""], "--stop with an empty text"),
        (
            ["LLAMA", "--prompt", "t1", "--eos", "99"],
            "the token 99 is to end an answer",
        ),
        (["LLAMA", "--prompt", "t1", "--step", "3"], "--step 3: without effect"),
        (["LLAMA", "--prompt", "t1", "--tensor", "3"], "tensor=3 does not divide the 8 devices"),
        (["LLAMA", "--prompt", "t1", "--max-new-tokens", "64"], "ask for 63 new ones at most"),
        (["LLAMA", "--prompt", "t1 " * 64], "there is no room for an answer"),
        (["LLAMA", "--prompt", "t1", "--adapter", "EMPTY"], "adapter_config.json cannot be read"),
        (["LLAMA", "--file", "EMPTY/x.txt", "--output", "x"], "ends with .txt"),
        (["LLAMA", "--file", "EMPTY/x.jsonl", "--output", "x"], "No such file"),
        (["LLAMA", "--chat", "--nodes", "2"], "--chat with --nodes 2: one process reads"),
        (["NO_SYSTEM", "--chat", "--system", "t1"], "the chat template refuses the conversation"),
        (["BERT", "--prompt", "t1"], "sees both sides of a token (bert)"),
        (["EMPTY", "--prompt", "t1"], "holds no run to generate from"),
        (["EMPTY/nothing", "--prompt", "t1"], "is no folder"),
    ],
)
def test_bad_inputs(folder_of, tmp_path, capsys, arguments, message):
    """All are found before anything is compiled, and nothing is written."""
    places = {"LLAMA": folder_of("llama"), "BERT": folder_of("bert"), "EMPTY": tmp_path}
    places["NO_SYSTEM"] = places["LLAMA"].with_name("no_system")
    if not places["NO_SYSTEM"].exists():
        shutil.copytree(places["LLAMA"], places["NO_SYSTEM"])
        (places["NO_SYSTEM"] / "chat_template.jinja").write_text(
            "{{ raise_exception('no system') if messages[0].role == 'system' }}"
        )
    told = []
    for word in arguments:
        for name, place in places.items():
            word = word.replace(name, str(place))
        told.append(word)
    assert generate(*told) == 2
    said = capsys.readouterr()
    assert "error: " in said.err
    assert message in said.err.replace("\n", " ")
    assert not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_that_are_not_finite_are_an_error(folder_of, tmp_path, capsys):
    from tools.hugging_face import read_file, write_file

    folder = copied(folder_of, "llama", tmp_path)
    tensors = read_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 3e38)
    write_file(folder / "model.safetensors", tensors)
    assert generate(folder, "--prompt", "t1", *LIKELIEST) == 2
    assert "the logits of the rows [0] are not finite" in capsys.readouterr().err
