"""MFU: which devices have a peak, which FLOPs count, and what a run records and shows."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train, values

import zeroxla.cli.train.job as job
from zeroxla.cli.train.step_values import StepValues
from zeroxla.cli.train.utilization import peak_flops_per_s

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8"),
]
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("TPU v5 lite", 197e12),
        ("cpu", None),
        ("NVIDIA of tomorrow", None),
    ],
)
def test_a_peak_is_that_of_the_device_in_the_table(kind, peak):
    assert peak_flops_per_s(kind, 8) == (None if peak is None else pytest.approx(8 * peak))


def test_what_is_recorded_of_a_step(monkeypatch):
    stats = [{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, None]
    devices = [SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    step_values = StepValues(
        task=SimpleNamespace(counted="tokens", num_counted=100),
        num_rows=8,
        schedule=lambda done: 0.5**done,
        least_s=0.5,
        of_program={"received_bytes": 3},
    )
    metrics = {"loss": np.float32(1.5), "tokens_per_s": 9, "of_rows": np.ones(8)}
    assert step_values.read(3, metrics, 2.0, {"data_s": 0.1}) == {
        **{"loss": 1.5, "examples": 24, "step_s": 2.0, "data_s": 0.1, "tokens_per_s": 50},
        # The third step is taken with the rate after two.
        **{"mfu": 0.25, "learning_rate": 0.25, "received_bytes": 3, "peak_memory_bytes": 7},
    }


@pytest.mark.slow
def test_a_run_records_and_shows_it_where_the_peak_is_known(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(job, "peak_flops_per_s", lambda kind, count: 1e9 * count)
    assert train("--run", tmp_path / "run", "--data", text, *TINY, "--steps", 3) == 0
    seconds, shares = (values(tmp_path / "run", name) for name in ("step_s", "mfu"))
    assert list(shares) == [1, 2, 3]
    # A token meets 12 x 16 x 16 weights of the layer and 256 x 16 of the head; of the scores of
    # attention all count, those behind the mask too.
    forward = 2 * (12 * 16 * 16 + 256 * 16) + 2 * 2 * 16 * 16
    assert shares[3] * seconds[3] * 8e9 == pytest.approx(3 * forward * 8 * 16)
    assert "MFU" in "".join(capfd.readouterr())
