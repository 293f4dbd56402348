"""`--config FILE`: the options of a command from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.train import check_no_option

from zeroxla.cli.config_file import with_config
from zeroxla.cli.errors import UsageError
from zeroxla.cli.generate.options import GenerateOptions
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.read_options import read_options
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.options import TrainOptions

TOML = """
steps = 7
data = ["a", "b"]

[zero]
zero = "zeropp"

[hops]
hpz-size = 4

[output]
resume = false
run = "there"
"""


def read(file: Path, *arguments: str) -> TrainOptions:
    words = with_config([*arguments, "--config", str(file)], TrainOptions)
    return read_options("train", words, TrainOptions)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(TOML)
    return file


class TestFile:
    def test_gives_options_in_groups_or_not(self, file):
        options = read(file)
        assert (options.training.steps, options.text.data) == (7, ("a", "b"))
        assert (options.zero.zero, options.hops.hpz_size) == ("zeropp", "4")
        assert (options.output.run, options.output.resume) == (Path("there"), False)

    @pytest.mark.parametrize(
        ("written", "words", "resume"),
        [
            ("true", [], True),
            ('"auto"', [], "auto"),
            ('"auto"', ["--no-resume"], False),
            ("false", ["--resume"], True),
            ("false", ["--resume=auto"], "auto"),
            ("true", ["--resume", "auto", "--steps", "9"], "auto"),
        ],
    )
    def test_a_flag_that_may_have_a_word(self, file, written, words, resume):
        file.write_text(f"resume = {written}\n")
        assert read(file, *words).output.resume == resume

    def test_repeats_a_flag_that_takes_one_value(self, file):
        file.write_text('prompt = ["a", "b c"]\n[sampling]\neos = [1, 2]\nstop = "x"\n')
        words = with_config(["there", f"--config={file}", "--eos=3"], GenerateOptions)
        options = read_options("generate", words, GenerateOptions)
        assert (options.source, options.prompts.prompt) == (Path("there"), ("a", "b c"))
        assert (options.sampling.eos, options.sampling.stop) == ((1, 2, 3), ("x",))

    @pytest.mark.parametrize("before", [True, False])
    def test_gives_way_to_flags(self, file, before):
        words = ["--steps", "9", "--data", "c", "--resume"]
        words = [f"--config={file}", *words] if before else [*words, f"--config={file}"]
        options = read_options("train", with_config(words, TrainOptions), TrainOptions)
        assert (options.training.steps, options.text.data) == (9, ("c",))
        assert options.output.resume
        assert options.zero.zero == "zeropp"

    @pytest.mark.parametrize("kind", [TrainOptions, RlhfOptions, PlanOptions])
    def test_takes_every_option_of_a_command(self, kind, tmp_path):
        """A run folder's options, as `to_dict` writes them, can be read with --config."""
        file = tmp_path / "options.json"
        options = read_options("any", ["--hpz-size=node", "--lora-rank=3"], kind)
        file.write_text(json.dumps(options.to_dict()))
        assert read_options("any", with_config(["--config", str(file)], kind), kind) == options

    def test_in_one_command(self, file, capsys):
        check_no_option(["--config", file, "--pipe", "0"], "--pipe 0 must be at least 1", capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "there is no option stpes; did you mean steps?"),
        ("[traning]\nsteps = 3", "there is no option traning; did you mean training?"),
        ("[mesh]\nsteps = 3", r"steps belongs to \[training\]; move it there"),
        ("steps = 3\n[training]\nsteps = 4", "has steps twice"),
        ("steps = {a = 1}", "is no value of an option"),
        ("steps = ", "is no TOML"),
    ],
)
def test_a_file_that_cannot_be(text, message, tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "missing.toml"], "--config missing.toml: No such file or directory"),
        (["--config"], "--config needs a file"),
        (["--config=a", "--config=b"], "given 2 times"),
    ],
)
def test_no_file(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        with_config(words, TrainOptions)


def test_a_json_file_holds_an_object(tmp_path):
    file = tmp_path / "options.json"
    file.write_text("[1]")
    with pytest.raises(UsageError, match="write an object with options"):
        read(file)
