"""Steps explained by the schedule of XLA's GPU compiler, for H200 that need not be there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from tools.perceptrons import Perceptrons

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.mesh.machines import Link
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

LENGTH, ROWS = 128, 512
LINK = Link(name="wire", bytes_per_s=50e9, latency_s=5e-6, of="device", source="a test")


@pytest.fixture
def gpus():
    """A mesh of GPUs that XLA can compile for."""
    try:
        return target_mesh(H200, {"node": 2, "device": 4})
    except WheelsMissingError as error:
        pytest.skip(str(error))


@pytest.mark.nightly
def test_a_step_on_gpus_is_compiled_for_them(gpus):
    config = ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(Perceptrons(), gpus, optax.adam(0.1), config=config)
    report = zeroxla.explain(step, {"tokens": jax.ShapeDtypeStruct((16, 33), jnp.int32)})
    assert report.target.device.name == "h200"
    assert report.source.startswith("Compiled for the step's own 8 NVIDIA H200 by jax ")
    assert {use.lane for use in report.uses} == {"node", "device"}


@pytest.mark.nightly
@pytest.mark.usefixtures("gpus")
def test_a_gather_that_cannot_run_ahead_stands_alone_in_the_schedule():
    model = GPT(vocab=256, length=LENGTH, layers=4, width=1024, heads=8, scan=True)
    config = ZeroConfig(compute_dtype="bfloat16", prefetch_bucket=0)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}
    mesh = zeroxla.make_mesh(nodes=2)
    reports = []
    for options in (config, dataclasses.replace(config, prefetch_bucket=None)):
        step = zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=options)
        reports.append(zeroxla.explain(step, batch, link=LINK))
    before, after = reports
    assert "by the compiler's schedule" in before.headline
    assert "Compiled for 8 NVIDIA H200 SXM" in before.source
    (stall,) = [x for x in before.stalls if x.what.startswith("forward gather over node: h/")]
    assert "unit 1.0 of a loop" in stall.what
    assert stall.line.startswith("models/gpt_layers.py:")
    assert stall.remedy.changes == {"prefetch_bucket": None}
    # Read from the schedule: nothing stands between start and done.
    (use,) = [
        x for x in before.uses if x.name == "forward gather over node" and "of a loop" in x.unit
    ]
    assert use.waited_s > 0.9 * use.seconds
    assert not [x for x in after.stalls if "prefetch_bucket" in x.remedy.changes]
    assert not [x for x in after.stalls if x.what.startswith("forward gather over node: h/")]
    assert after.waited_s < before.waited_s
