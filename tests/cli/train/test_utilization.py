"""MFU: which devices have a peak, and what a run on one of them records and shows."""

import jax
import jax.numpy as jnp
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train, values

import zeroxla.cli.train.job as job
from zeroxla.cli.train.utilization import flops_per_token, peak_flops_per_s

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


def test_a_token_takes_six_operations_for_each_parameter():
    params = {"a": jnp.zeros((3, 5)), "b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    assert flops_per_token(params) == 6 * (15 + 7)


@pytest.mark.slow
def test_a_run_records_and_shows_it_where_the_peak_is_known(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(job, "peak_flops_per_s", lambda kind, count: 1e9 * count)
    assert train("--run", tmp_path / "run", "--data", text, *TINY, "--steps", 3) == 0
    rates, shares = (values(tmp_path / "run", name) for name in ("tokens_per_s", "mfu"))
    assert list(shares) == [1, 2, 3]
    ratio = shares[3] / rates[3]
    assert ratio * 8e9 / 6 == pytest.approx(round(ratio * 8e9 / 6))  # a number of parameters
    assert "MFU" in "".join(capfd.readouterr())
