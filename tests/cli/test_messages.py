"""Messages about inputs that cannot work say what was wrong, and what to do."""

from __future__ import annotations

import itertools
import socket

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from tools.train import check_no_option, check_refused

import zeroxla
from zeroxla.cli.export import ExportOptions, export
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.ranks import make_ranks
from zeroxla.cli.main import main
from zeroxla.hybrid.prompts import LengthLimits
from zeroxla.mesh.batches import global_batch
from zeroxla.models import MLP
from zeroxla.models.losses import next_token_loss
from zeroxla.rlhf.make import Storage, make_loop
from zeroxla.rlhf.settings import Settings


class TestBatch:
    def test_that_does_not_divide_over_the_devices(self, text, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        message = "--batch 7 does not divide over 8 devices (node=2, device=4); use a multiple of 8"
        check_refused(["--data", text, "--batch", "7"], message, capsys)

    def test_of_one_process_has_no_parts(self, mesh24):
        with pytest.raises(ValueError, match=r"its rows do not divide over 8 \(node, device\)"):
            global_batch({"x": np.zeros((7, 2))}, mesh24)


def test_export_of_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run to export \(it has no config.json\)"):
        export(ExportOptions(run=tmp_path))


def test_prompts_are_not_cut_to_nothing():
    limits = LengthLimits(16)
    with pytest.raises(ValueError, match="ask for 15 new ones at most, and cut the prompts"):
        limits.buckets(20, 16)
    with pytest.raises(ValueError, match="cut the prompts to 6 tokens, or ask for fewer"):
        limits.buckets(20, 10)


class TestPicture:
    ARGUMENTS = ("plan", "--length", "16", "--nodes", "1", "--devices-per-node", "1")

    def test_of_a_plan_makes_its_folder(self, tmp_path):
        picture = tmp_path / "new" / "folder" / "plan.png"
        assert main([*self.ARGUMENTS, "--picture", str(picture)]) == 0
        assert picture.stat().st_size > 0

    def test_below_a_file_is_refused_before_planning(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        picture = tmp_path / "file" / "plan.png"
        assert main([*self.ARGUMENTS, "--model", "nothing", "--picture", str(picture)]) == 2
        assert f"--picture {picture}: cannot make the folder" in capsys.readouterr().err


class TestPort:
    def test_beyond_the_last_one(self, capsys):
        assert main(["launch", "--port", "99999", "--", "true"]) == 2
        assert "--port 99999: at most 65535" in capsys.readouterr().err

    def test_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(ValueError, match=rf"--port {port}: Address already in use; name"):
                make_ranks(LaunchOptions(port=port), 0)
        assert len(make_ranks(LaunchOptions(port=port), 0)) == 1


class Other(nn.Module):
    """A language model without leaves of the names `attn` and `mlp`."""

    length = 16

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(8, name="out")(nn.Embed(8, 4)(tokens))

    @nn.nowrap
    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


def test_reference_of_a_model_with_other_names(mesh24):
    """Nobody has set targets: the message names the reference, and both ways out."""
    settings = Settings(prompt_length=2, new_tokens=4, rows=8, group=4)
    with pytest.raises(
        ValueError, match=r"the reference cannot be stored as int8, because targets"
    ) as e:
        make_loop(Other(), mesh24, settings, reward=lambda rollouts: rollouts.lengths_B)
    assert "--reference float32" in str(e.value)
    with pytest.raises(ValueError, match=r"^targets="):
        make_loop(
            Other(),
            mesh24,
            settings,
            reward=lambda rollouts: rollouts.lengths_B,
            storage=Storage(rank=2),
        )


def test_state_of_another_optimizer(mesh24):
    """The first difference, and not two whole trees."""
    batch = {"image": np.zeros((8, 4, 4, 1)), "label": np.zeros(8, int)}
    state = zeroxla.make_step(MLP.tiny(), mesh24, optax.sgd(0.1)).init(jax.random.key(0), batch)
    step = zeroxla.make_step(MLP.tiny(), mesh24, optax.adam(0.1))
    step.abstract_state(batch)
    with pytest.raises(ValueError, match="at '0' it needs ScaleByAdamState and has") as error:
        step(state, batch)
    assert len(str(error.value)) < 400


class TestHelp:
    @pytest.fixture(params=["train", "rlhf", "plan", "launch", "export", "generate"])
    def lines(self, request, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit):
            main([request.param, "--help"])
        return capsys.readouterr().out.splitlines()

    def test_shows_no_none_and_no_empty_default(self, lines):
        text = " ".join(lines)
        assert "None" not in text
        assert "(default: )" not in text

    def test_is_wrapped_once(self, lines):
        """Lines are filled: the first word of the next one would not have fitted."""
        assert max(map(len, lines)) <= 100
        inner = [line.strip("│").rstrip()[1:] for line in lines if line.startswith("│  ")]
        for line, after in itertools.pairwise(inner):
            if line.startswith(" " * 20) and after.startswith(" " * 20):
                word = after.split()[0].split(",")[0]
                assert len(line) + 1 + len(word) >= 96, (line, after)

    def test_errors_name_options_and_no_classes(self, capsys):
        check_no_option(["--steps", "0"], "error: --steps 0 must be at least 1", capsys)
        assert main(["plan", "--search", "--compile"]) == 2
        assert "Options" not in capsys.readouterr().err
