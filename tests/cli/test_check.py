"""`zeroxla check`: it finds models and batches by name, and its status says whether all is well."""

from __future__ import annotations

import json
import shutil

import pytest
from tools import planted_faults
from tools.quick import thinned

from zeroxla.cli.check import run
from zeroxla.cli.check.subject import made_batch, named_batch, named_model, settings
from zeroxla.cli.main import main
from zeroxla.models import GPT

OWN = """
import flax.linen as nn, jax.numpy as jnp, numpy as np
from flax import nnx
from planted import BATCH, Convolutions, Perceptron, init, healthy, summed

pair = (init, healthy)
bad = (init, summed)
instance = Convolutions()

def with_batch(axis=None):
    return Convolutions(axis), BATCH

def batch():
    return BATCH

def needy(rows):
    return BATCH

def of_rngs(rngs):
    return Perceptron(rngs)

def mse(apply, batch, *, train):
    return jnp.mean((apply(batch["x"]) - batch["y"]) ** 2)

dense = nn.Dense(1)

class Wide(nnx.Module):
    def __init__(self, width, rngs):
        self.inner = nnx.Linear(width, width, rngs=rngs)

class Other:
    pass

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the user's code, in which the command runs."""
    shutil.copy(planted_faults.__file__, tmp_path / "planted.py")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules})
    return tmp_path


@pytest.mark.parametrize("columns", thinned(["80"], slow=["100", "140"]))
def test_prints_the_report_and_ends_with_status_0(folder, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["check", "own:pair", "--batch", "own:batch"]) == 0
    printed = capsys.readouterr().out
    assert "the pair init, healthy on node 2 x device 4" in printed
    assert "No faults; 0 notices." in printed
    assert max(map(len, printed.splitlines())) <= int(columns)


def test_a_fault_has_status_1_and_json_the_report(folder, capsys):
    assert main(["check", "own.py:bad", "--batch", "own:BATCH", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    found = {result["name"]: result for result in report["results"]}
    assert found["equality"]["verdict"] == "fault"
    assert "sums over rows" in found["equality"]["found"]


@pytest.mark.parametrize(
    "arguments",
    thinned(
        [["own:with_batch", "--set", "axis=batch", "--axis-name", "batch"]],
        slow=[
            ["zeroxla.models:GPT", "--set", "layers=3", "--compute-dtype", "float16"],
            ["zeroxla.models:Llama.tiny", "--nodes", "1", "--tensor", "2"],
            ["own:dense", "--loss", "own:mse", "--batch", "own:batch"],
            ["own:of_rngs", "--batch", "own:batch", "--accumulate", "2"],
        ],
    ),
    ids=" ".join,
)
def test_models_of_each_kind(folder, arguments, capsys):
    assert main(["check", *arguments]) == 0
    assert "No faults; 0 notices." in capsys.readouterr().out


@pytest.fixture
def asked(folder, monkeypatch):
    """Return a function that returns what the command checks."""

    class Seen(Exception):
        pass

    def seen(model, batch, **options):
        raise Seen(model, batch, options)

    def asked(*arguments):
        with pytest.raises(Seen) as found:
            main(["check", *arguments])
        return found.value.args

    monkeypatch.setattr(run, "check", seen)
    return asked


def test_the_options_are_those_of_the_command_and_then_of_the_file(asked, folder):
    config = {"fp16": {"enabled": True}, "gradient_accumulation_steps": 4}
    (folder / "deepspeed.json").write_text(json.dumps(config))
    flags = ("--accumulate", "2", "--frozen", "v", "--rewrite", "--unit-elements", "5")
    names = ("--loss", "own:mse", "--axis-name", "batch", "--batch", "own:batch")
    _, batch, options = asked("own:dense", *names, *flags, "--deepspeed", "deepspeed.json")
    config = options["config"]
    assert (config.compute_dtype, config.accumulate, config.frozen) == ("float16", 2, ("v",))
    assert config.rewrite is not None
    assert config.unit_elements == 5
    assert options["loss"].__name__ == "mse"
    assert options["axis_names"] == {"batch": ("node", "device")}
    assert set(batch) == {"x", "y"}
    _, _, options = asked("own:pair", "--batch", "own:batch", "--init-loss-scale", "8")
    config = options["config"]
    assert (config.init_loss_scale, config.num_micro_batches) == (8, 1)
    assert not config.frozen
    assert not config.rewrite
    assert options["axis_names"] is None


def test_a_made_batch_has_rows_for_each_device_and_micro_batch(asked):
    _, batch, _ = asked("zeroxla.models:GPT", "--accumulate", "3")
    assert batch["tokens"].shape == (2 * 8 * 3, 17)


class TestModel:
    def test_of_a_class_with_a_tiny_instance(self):
        model, batch = named_model("zeroxla.models:GPT", {"layers": 3})
        assert (model, batch) == (GPT.tiny(layers=3), None)

    def test_of_an_instance_with_other_values(self, folder):
        model, _ = named_model("own:instance", {"axis": "batch"})
        assert model.axis == "batch"

    def test_of_an_nnx_class(self, folder):
        from flax import nnx

        model, _ = named_model("own:Wide", {"width": 3})
        assert model(nnx.Rngs(0)).inner.kernel.shape == (3, 3)

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            ("own:number", {}, "own:number is 3, of type int; name a Flax module"),
            ("own:Other", {}, "is the class Other, which is no Flax module"),
            ("own:Wide", {}, "own:Wide needs width; give them with --set"),
            ("own:pair", {"width": 3}, "--set width: own:pair is made already"),
            ("own:with_batch", {"depth": 3}, "does not take --set depth=3"),
            ("own:missing", {}, "own has no 'missing'"),
        ],
    )
    def test_that_cannot_be_made(self, folder, name, values, message):
        with pytest.raises(ValueError, match=message):
            named_model(name, values)


class TestBatch:
    def test_of_tokens(self):
        batch = made_batch(5, 8, 8)
        assert batch["tokens"].shape == (16, 9)
        assert batch["tokens"].max() == 4
        assert made_batch(None, None, 4)["tokens"].shape == (8, 17)

    def test_of_a_function_with_arguments(self, folder):
        with pytest.raises(ValueError, match="--batch own:needy needs rows"):
            named_batch("own:needy")

    def test_that_a_loss_does_not_take(self, folder, capsys):
        assert main(["check", "own:pair"]) == 2
        message = capsys.readouterr().err
        assert '{"tokens": int32[16x17]}' in message
        assert "reads 'x', which the batch does not have" in message
        assert "give --batch MODULE:NAME" in message


def test_settings_are_pythons_values_or_text():
    assert settings(["a=(1, 2)", "b=relu", "c=None"]) == {"a": (1, 2), "b": "relu", "c": None}
    with pytest.raises(ValueError, match="--set width: give NAME=VALUE"):
        settings(["width"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pair"], "names no object; give MODULE:NAME"),
        (["own:pair", "--accumulate", "0"], "--accumulate 0 must be at least 1"),
        (["own:pair", "--unit-elements", "0"], "--unit-elements 0 must be at least 1"),
        (["own:pair", "--init-loss-scale", "0"], "init_loss_scale=0.0 must be a finite number"),
    ],
)
def test_bad_input_has_status_2(folder, arguments, message, capsys):
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
