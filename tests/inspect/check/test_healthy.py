"""Healthy models pass all checks; what cannot be checked is refused."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tools import planted_faults as planted
from tools.quick import thinned

import zeroxla
from zeroxla.models import GPT, Llama

TOKENS = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 17), dtype=np.int32)}
PAIR = (planted.init, planted.healthy)


def batch_norm():
    names = {"batch": ("node", "device")}
    return planted.Convolutions("batch"), planted.BATCH, {"axis_names": names}


MODELS = {
    "pair": lambda: (PAIR, planted.BATCH, {}),
    "stacked": lambda: ((planted.init_stacked, planted.scanned), planted.BATCH, {}),
    "batch_norm": batch_norm,
    "nnx": lambda: (planted.Perceptron, planted.BATCH, {}),
    "gpt": lambda: (GPT.tiny(), TOKENS, {}),
    "gpt_with_dropout": lambda: (GPT.tiny(dropout=0.1), TOKENS, {}),
    "llama": lambda: (Llama.tiny(), TOKENS, {}),
}


@pytest.mark.parametrize("dtype", ["float16"])
@pytest.mark.parametrize(
    "name",
    thinned(["stacked"], slow=["batch_norm", "pair", "nnx", "gpt", "gpt_with_dropout", "llama"]),
)
def test_passes_all(name, dtype):
    model, batch, options = MODELS[name]()
    if name == "nnx":
        model = lambda rngs: planted.Perceptron(rngs)  # noqa: E731
    config = zeroxla.ZeroConfig(compute_dtype=dtype)
    report = zeroxla.check(model, batch, config=config, **options)
    assert {r.verdict for r in report.results} == {"ok"}, str(report)
    assert "equal those of" in report["equality"].found


def test_a_model_that_draws_random_numbers_weighs_rows_and_casts_to_a_narrow_dtype():
    batch = {name: np.repeat(x, 2, 0) for name, x in planted.BATCH.items()}
    config = zeroxla.ZeroConfig(accumulate=2)
    report = zeroxla.check((planted.init, planted.half), batch, config=config)
    assert report.ok
    assert "the devices' rows on one device, each under its own key" in report["equality"].found
    words = "6.2e-02 is allowed, as the model itself computes in a narrow dtype"
    assert words in report["equality"].found
    assert "and all fit" in report["overflow"].found


def test_with_micro_batches_frozen_leaves_and_axes():
    mesh = zeroxla.make_mesh(nodes=1, tensor=2)
    config = zeroxla.ZeroConfig(accumulate=2, frozen="v")
    batch = {name: np.repeat(x, 2, 0) for name, x in planted.BATCH.items()}
    batch["x"][::8, 0] = 1  # each micro-batch has an item that counts
    model = planted.init, planted.weighed
    report = zeroxla.check(model, batch, mesh=mesh, config=config)
    assert report.ok
    assert report.mesh == "node 1 x device 4 x tensor 2"
    assert "1 gradients equal those of the whole batch" in report["equality"].found
    assert report["gathered"].found.endswith("gathered again for a later use: w 2 times")


def test_the_report_as_text_and_as_plain_types():
    report = zeroxla.CheckReport(
        model="Net",
        mesh="node 2 x device 4",
        results=(
            zeroxla.CheckResult(name="equality", verdict="ok", found="equal"),
            zeroxla.CheckResult(name="overflow", verdict="fault", found="big", remedy="scale"),
        ),
    )
    text = str(report)
    assert "Net on node 2 x device 4" in text
    assert "Remedy: scale" in text
    assert text.endswith("Faults: overflow.")
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"] is False
    assert plain["results"][1]["remedy"] == "scale"
    with pytest.raises(KeyError, match="there are equality, overflow"):
        report["other"]


class TestRefuses:
    def test_one_device(self):
        mesh = zeroxla.make_mesh(nodes=1, devices_per_node=1, devices=jax.devices()[:1])
        with pytest.raises(ValueError, match="check on one device"):
            zeroxla.check(PAIR, planted.BATCH, mesh=mesh)

    def test_stages(self):
        with pytest.raises(ValueError, match="mesh with pipe=2"):
            zeroxla.check(PAIR, planted.BATCH, mesh=zeroxla.make_mesh(pipe=2))

    def test_rows_that_do_not_divide(self):
        with pytest.raises(ValueError, match="batch of 3 does not divide over 8 devices"):
            zeroxla.check(PAIR, {"x": planted.ROWS[:3], "y": planted.ROWS[:3]})
