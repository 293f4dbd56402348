"""Every option of `Outer` has a flag, on `zeroxla train` and `zeroxla plan`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from tools.train import check_no_option

from zeroxla import Outer, WireFormat, ZeroConfig
from zeroxla.cli.continued_run import check_resumable
from zeroxla.cli.errors import UsageError
from zeroxla.cli.main import main
from zeroxla.cli.outer_options import OuterOptions
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.plan.run import plan_from
from zeroxla.cli.read_options import read_options
from zeroxla.cli.train.checks import FREE
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.zero_options import zero_config
from zeroxla.config.outer import nesterov

COMMANDS = {"train": TrainOptions, "plan": PlanOptions}
INT8 = WireFormat(bits=8, block=64)

# A field of Outer, flags that set it, and the value that it then has.
FLAGS = {
    "every": (["--outer-every=7"], 7),
    "wire": (["--outer-wire=int8/64"], INT8),
    "error_feedback": (["--no-outer-error-feedback"], False),
    "fragments": (["--outer-fragments=3"], 3),
    "delay": (["--outer-delay=3"], 3),
    "state": (["--outer-state=host"], "host"),
    "mixing": (["--outer-mixing=0.25"], 0.25),
}
WITHOUT_A_FLAG = {"optimizer": "--outer-learning-rate and --outer-momentum; the test below"}


def outer(command: str, *arguments: str) -> Any:
    options = read_options(command, arguments, COMMANDS[command])
    return zero_config(options, {}, outer=options.outer).outer


@pytest.mark.smoke
def test_every_field_of_outer_has_a_flag():
    fields = {field.name for field in dataclasses.fields(Outer)}
    assert fields == FLAGS.keys() | WITHOUT_A_FLAG.keys()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("field", FLAGS)
def test_a_flag_reaches_its_field(field, command):
    arguments, value = FLAGS[field]
    assert getattr(outer(command, "--outer=diloco", *arguments), field) == value
    assert getattr(Outer(), field) != value  # or the flag might do nothing


def without_optimizer(found: Outer) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(found) if field.name != "optimizer"]
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize("preset", ["diloco", "streaming"])
@pytest.mark.parametrize("every", [4, 100])
def test_without_flags_a_preset_is_the_library_s(preset, every):
    library = getattr(ZeroConfig, preset)(every=every).outer
    found = outer("train", f"--outer={preset}", f"--outer-every={every}")
    assert without_optimizer(found) == without_optimizer(library)
    assert outer("train") is None


def test_parts_may_be_units():
    assert outer("train", "--outer=diloco", "--outer-fragments=units").fragments == "units"


def updates(optimizer: optax.GradientTransformation) -> list[float]:
    """Return what an optimizer makes of three gradients."""
    state, found = optimizer.init(jnp.zeros(1)), []
    for gradient in (1.0, 2.0, -1.0):
        update, state = optimizer.update(jnp.array([gradient]), state)
        found.append(float(update[0]))
    return found


@pytest.mark.parametrize(
    ("arguments", "optimizer"),
    [
        (["--outer=diloco"], optax.sgd(0.7, momentum=0.9, nesterov=True)),
        (["--outer=streaming"], optax.sgd(1.0, momentum=0.8, nesterov=True)),
        (["--outer=diloco", "--outer-learning-rate=0.5"], nesterov(0.5, 0.9)),
        (["--outer=diloco", "--outer-momentum=0.8"], nesterov(0.7, 0.8)),
        (["--outer=streaming", "--outer-momentum=0.5"], nesterov(1.0, 0.5)),
        (["--outer=streaming", "--outer-every=10"], nesterov(0.7, 0.9)),
        (["--outer=diloco", "--outer-momentum=0", "--outer-learning-rate=1"], optax.sgd(1.0)),
    ],
)
def test_flags_make_the_outer_optimizer(arguments, optimizer):
    found = outer("train", *arguments)
    assert updates(found.optimizer) == pytest.approx(updates(optimizer))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--outer-every=4"], "--outer-every: without effect, there are no islands; leave out, or"),
        (
            ["--islands=2"],
            "--islands 2 without --outer: islands would exchange nothing; give --out",
        ),
        (["--outer=diloco", "--islands=0"], "--islands 0 must be at least 1"),
        (["--outer=diloco", "--outer-every=0"], "--outer-every 0 must be at least 1"),
        (["--outer=diloco", "--outer-delay=-1"], "--outer-delay -1 must be at least 0"),
        (["--outer=diloco", "--outer-fragments=some"], "--outer-fragments some: give units, or a"),
        (
            ["--outer=diloco", "--outer-fragments=101"],
            "--outer-fragments 101 with --outer-every 100",
        ),
        (
            ["--outer=diloco", "--outer-delay=100"],
            "--outer-delay 100 with --outer-every 100: an ex",
        ),
        (["--outer=diloco", "--outer-wire=int9"], "--outer-wire int9: a format is"),
        (
            ["--outer=diloco", "--outer-mixing=1"],
            "--outer-mixing 1.0 must be at least 0, and below",
        ),
        (["--outer=diloco", "--outer-momentum=1"], "--outer-momentum 1.0 must be at least 0, and"),
        (
            ["--outer=diloco", "--outer-learning-rate=0"],
            "--outer-learning-rate 0.0 must be above 0",
        ),
        (
            ["--outer=diloco", "--offload-params=disk", "--offload-path=d"],
            "--outer diloco with --offload-params disk: islands exchange parameters from memory",
        ),
        (
            ["--outer=streaming"],
            "--outer streaming: there are no islands; give --islands 2 for two",
        ),
    ],
)
def test_options_that_do_not_go_together(arguments, message, capsys):
    check_no_option(arguments, message, capsys)


def test_a_wire_that_rounds_stochastically_is_refused_with_the_flags():
    with pytest.raises(ValueError, match=r"--outer diloco with these options: Outer\(wire"):
        OuterOptions(outer="diloco", outer_wire="int8,stochastic").make()


class TestWhereIslandsAreNot:
    """A process that is part of an island, and a command that trains none."""

    def test_an_island_must_exchange(self, monkeypatch, capsys):
        monkeypatch.setenv("ZEROXLA_ISLANDS", "127.0.0.1:1")
        monkeypatch.setenv("ZEROXLA_SLOT", "0")
        check_no_option(
            [], "(ZEROXLA_ISLANDS=127.0.0.1:1), and --outer is none, so it would", capsys
        )

    def test_an_island_has_a_number(self, monkeypatch, capsys):
        monkeypatch.setenv("ZEROXLA_ISLANDS", "127.0.0.1:1")
        monkeypatch.delenv("ZEROXLA_SLOT", raising=False)
        check_no_option(["--outer=diloco"], "start it with zeroxla island --join HOST:PORT", capsys)
        monkeypatch.setenv("ZEROXLA_SLOT", "first")
        check_no_option(["--outer=diloco"], "ZEROXLA_SLOT='first' of zeroxla island", capsys)

    @pytest.mark.parametrize("arguments", [["--outer=diloco"], ["--islands", "2"], []])
    def test_rlhf_trains_none(self, arguments, monkeypatch, capsys):
        if not arguments:
            monkeypatch.setenv("ZEROXLA_ISLANDS", "127.0.0.1:1")
        assert main(["rlhf", *arguments]) == 2
        named = arguments[0].partition("=")[0] if arguments else "ZEROXLA_ISLANDS=127.0.0.1:1"
        assert f"{named}: zeroxla rlhf trains no islands" in capsys.readouterr().err

    def test_a_search_tries_none(self, capsys):
        assert main(["plan", "--search", "--outer=diloco"]) == 2
        assert "--search with --outer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_counts_the_outer_state():
    usual = ["--length=64", "--devices-per-node=2", "--batch=8"]
    plain, islands = (
        plan_from(read_options("plan", [*usual, *more], PlanOptions)).most_bytes
        for more in ([], ["--outer=diloco"])
    )
    assert islands > plain


class TestResume:
    def test_the_number_of_islands_may_change(self):
        given = ["--outer=diloco", "--islands=3"]
        stored = read_options("train", ["--outer=diloco", "--islands=2"], TrainOptions)
        check_resumable(stored, read_options("train", given, TrainOptions), FREE)

    def test_how_they_exchange_may_not(self):
        given = read_options("train", ["--outer=diloco", "--outer-every=9"], TrainOptions)
        stored = read_options("train", ["--outer=diloco"], TrainOptions)
        with pytest.raises(ValueError, match="--outer-every is None there and 9 here"):
            check_resumable(stored, given, FREE)

    @pytest.mark.parametrize("kind", COMMANDS.values())
    def test_options_survive_the_run_folder(self, kind):
        given = ["--outer=streaming", "--outer-wire=int8", "--outer-mixing=0.5"]
        options = read_options("any", given, kind)
        assert kind.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def test_a_plan_takes_the_number_of_islands_and_their_link():
    arguments = ["--outer=streaming", "--islands=4", "--island-link=10mbit"]
    found = read_options("plan", arguments, PlanOptions).outer.planned()
    assert (found.num, found.link) == (4, "10mbit")
    assert read_options("plan", [], PlanOptions).outer.planned() is None
    with pytest.raises(UsageError, match=r"--islands, --island-link: without effect"):
        read_options("plan", arguments[1:], PlanOptions)
    with pytest.raises(UsageError, match=r"--islands 0 must be at least 1"):
        read_options("plan", ["--outer=diloco", "--islands=0"], PlanOptions)
