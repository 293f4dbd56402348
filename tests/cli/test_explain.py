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


@pytest.fixture
def explained(run, monkeypatch):
    """Return a function that returns the (step, batch, options) that are explained, of a run with
    other options."""

    class Seen(Exception):
        pass

    def seen(step, batch, **options):
        raise Seen(step, batch, options)

    def explained(*arguments, **changes):
        config = json.loads((run / "config.json").read_text())
        for name, values in changes.items():
            config["options"][name] |= values
        folder = run.with_name("other")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(Seen) as found:
            main(["explain", str(folder), "--no-compile", *arguments])
        return found.value.args

    monkeypatch.setattr("zeroxla.cli.explain.run.explain", seen)
    return explained


def test_the_step_is_the_runs_on_the_mesh_that_is_asked_for(explained):
    step, batch, options = explained()
    assert dict(step.mesh.shape) == {"node": 2, "device": 4}
    assert {name: x.shape for name, x in batch.items()} == {"tokens": (16, 33)}
    assert (options["device"], options["least_share"]) == ("h200", 0.01)
    asked = ("--nodes=4", "--devices-per-node=2", "--batch=32", "--device=a100")
    step, batch, options = explained(*asked, "--least-share=0.2", "--link=10gbit")
    assert dict(step.mesh.shape) == {"node": 4, "device": 2}
    assert batch["tokens"].shape == (32, 33)
    assert (options["link"], options["least_share"]) == ("10gbit", 0.2)
    step, *_ = explained(mesh={"nodes": 1, "devices_per_node": 8})
    assert dict(step.mesh.shape) == {"node": 1, "device": 8}


def test_the_batch_of_rows_and_of_packed_rows(explained):
    _, batch, _ = explained(text={"data": ["rows.jsonl"]})
    assert set(batch) == {"tokens", "mask"}
    _, batch, _ = explained(text={"data": ["rows.jsonl"]}, rows={"packing": True})
    assert {name: x.shape for name, x in batch.items()} == {
        "tokens": (16, 33),
        **dict.fromkeys(("mask", "segments", "positions"), (16, 32)),
    }


def test_the_step_has_the_runs_adapters_and_stages(explained):
    step, batch, _ = explained(lora={"lora_rank": 4})
    assert set(step.abstract_state(batch).params) == {"base", "lora"}
    for weights in ("step", "tick"):
        step, *_ = explained(pipeline={"pipe": 2, "weights": weights})
        assert (step.mesh.shape["pipe"], step.programs.weights) == (2, weights)


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
