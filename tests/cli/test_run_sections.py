"""A config.json of a run without one of its sections: the error names the section and the file."""

import json

import pytest

from zeroxla.cli.main import main
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.run_sections import stored_options
from zeroxla.cli.train.options import TrainOptions

WHOLE = {"command": "train", "options": TrainOptions().to_dict(), "text": {}}
REWARDED = {"command": "rlhf", "options": RlhfOptions().to_dict(), "before": {}, "text": {}}


def write(run, config):
    (run / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(config))
    return run


def without(config, *path):
    copy = json.loads(json.dumps(config))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return copy


def test_a_whole_config_is_read(tmp_path):
    assert stored_options(TrainOptions, write(tmp_path, WHOLE)) == TrainOptions()
    assert stored_options(RlhfOptions, write(tmp_path, REWARDED)) == RlhfOptions()


def test_a_run_of_an_earlier_version_has_the_defaults_of_newer_groups(tmp_path):
    for whole, kind in ((WHOLE, TrainOptions), (REWARDED, RlhfOptions)):
        run = write(tmp_path, without(whole, "options", "tracking"))
        assert stored_options(kind, run) == kind()


@pytest.mark.parametrize("command", ["train", "export"])
@pytest.mark.parametrize(
    ("config", "section"),
    [
        (without(WHOLE, "options"), "options"),
        (without(WHOLE, "options", "model"), "options.model"),
        ({**WHOLE, "options": [1]}, "options"),
        ({**WHOLE, "options": {**WHOLE["options"], "training": None}}, "options.training"),
    ],
)
def test_a_missing_section_is_named(command, config, section, tmp_path, capsys):
    run = str(write(tmp_path, config))
    arguments = ["train", "--resume", "--run", run] if command == "train" else ["export", run]
    assert main(arguments) == 2
    message = f"{run}/config.json lacks the section '{section}'; restore the file"
    assert message in capsys.readouterr().err


def test_a_run_of_rlhf_needs_the_training_before_it(tmp_path, capsys):
    run = str(write(tmp_path, without(REWARDED, "before")))
    assert main(["export", run]) == 2
    assert "lacks the section 'before'" in capsys.readouterr().err
    run = str(write(tmp_path, {**WHOLE, "options": {}}))
    assert main(["rlhf", "--init-run", run, "--run", str(tmp_path / "new")]) == 2
    assert "lacks the section 'options.text'" in capsys.readouterr().err


def test_what_is_no_config_is_named(tmp_path, capsys):
    run = str(write(tmp_path, [1, 2]))
    assert main(["train", "--resume", "--run", run]) == 2
    assert "config.json holds a list, and not the sections of a run" in capsys.readouterr().err
