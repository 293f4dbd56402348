"""`zeroxla explain`: the report on a run's step, from its folder alone."""

from __future__ import annotations

import json

import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train

from zeroxla.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = ("--layers=2", "--width=64", "--heads=2", "--length=32", "--batch=16")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has begun and ended."""
    folder = tmp_path_factory.mktemp("explained") / "run"
    text = folder.parent / "text.txt"
    text.write_text("what a step waits for\n" * 400)
    options = (f"--run={folder}", f"--data={text}", "--steps=1", "--sample-bytes=0")
    assert train(*SHAPE, *options) == 0
    return folder


def test_prints_what_the_step_waits_for(run, capsys, tmp_path):
    picture = tmp_path / "pictures" / "step.png"
    status = main(["explain", str(run), "--no-compile", f"--picture={picture}"])
    out = capsys.readouterr().out
    assert out.startswith("A step on node=2 x device=4 of NVIDIA H200 SXM, by its trace: ")
    for words in ("What a setting would change", "Collectives that nothing hides", "gpt_layers.py"):
        assert words in " ".join(out.split())
    assert status == 1  # a step so small waits for its links
    assert picture.stat().st_size > 0


def test_json_has_the_figures_and_nothing_else(run, capsys):
    assert main(["explain", str(run), "--json", "--no-compile", "--nodes=1"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"node": 1, "device": 4}
    assert found["seconds"] >= found["waited_s"] > 0
    assert all(x["remedy"] and x["seconds"] > 0 for x in found["stalls"])


def test_the_status_is_zero_without_a_stall(run, capsys):
    arguments = ["explain", str(run), "--no-compile", "--least-share=0.99"]
    assert main(arguments) == 0
    assert "No setting is missing" in capsys.readouterr().out


@pytest.mark.slow
def test_the_update_is_compiled(run, capsys):
    assert main(["explain", str(run)]) in (0, 1)
    assert "Compiled for 8 CPU devices" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device=h2000"], "there is no device 'h2000'; did you mean h200"),
        (["--link=fast"], "there is no link 'fast'"),
        (["--nodes=0"], "--nodes 0 must be at least 1"),
        (["--batch=12"], "--batch 12 does not divide over 8 devices"),
        (["--least-share=1.5"], "--least-share 1.5: give 0 or more, and less than 1"),
    ],
)
def test_bad_input_is_refused(run, capsys, arguments, message):
    assert main(["explain", str(run), "--no-compile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "holds no run to explain (it has no config.json)" in capsys.readouterr().err


def test_a_run_of_another_command_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"command": "rlhf"}')
    assert main(["explain", str(tmp_path)]) == 2
    assert "is a run of zeroxla rlhf" in capsys.readouterr().err
