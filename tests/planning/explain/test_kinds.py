"""Steps of every kind are explained: wires, offload, stages, axes, adapters, a budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from tools.perceptrons import Perceptrons

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.models import GPT, Llama

BATCH = {"tokens": jax.ShapeDtypeStruct((32, 33), jnp.int32)}
SMALL = {"persistence_threshold": 0, "quantize_threshold": 16}


def explained(config, *, model=None, mesh=None, **arguments):
    mesh = mesh or zeroxla.make_mesh(nodes=2)
    step = zeroxla.make_step(
        model or Perceptrons(), mesh, optax.adam(0.1), config=config, **arguments
    )
    report = zeroxla.explain(step, BATCH, compiled=False)
    # Everything that is waited for is known, and every wait has its place.
    assert all(wait.event is not None for wait in report.waits)
    total_s = sum(use.waited_s for use in report.uses)
    assert total_s == pytest.approx(report.waited_s)
    assert str(report)
    return report


def names(report):
    return {use.name for use in report.uses}


def test_quantized_wires_and_micro_batches():
    report = explained(ZeroConfig.zeropp(accumulate=2, **SMALL))
    assert "reduce over node" in names(report)
    assert not any("weight_wire" in x.remedy.changes for x in report.stalls)
    # hpZ: no leaf crosses nodes in backward.
    assert not any(
        use.name == "backward gather over node" and use.leaves and "head/kernel" in use.leaves
        for use in report.uses
    )


def test_a_state_on_the_host():
    config = ZeroConfig(offload=Offload(optimizer="host", sub_group=1000), **SMALL)
    report = explained(config)
    assert "update: host" in names(report)
    (stall,) = [x for x in report.stalls if x.what.startswith("update: host")]
    assert "Offload" in stall.remedy.text
    assert not stall.remedy.changes


def test_the_stages_of_a_pipeline():
    report = explained(
        ZeroConfig(**SMALL),
        model=zeroxla.Pipeline.from_model(Perceptrons()),
        mesh=zeroxla.make_mesh(pipe=2, nodes=1),
        microbatches=4,
        weights="tick",
    )
    assert "send over pipe" in names(report)
    assert any('weights="step"' in x.remedy.text for x in report.stalls)


def test_adapters_on_a_frozen_base():
    model = zeroxla.lora(Llama.tiny(), rank=4, targets=".*kernel")
    report = explained(ZeroConfig(**SMALL), model=model)
    assert any(leaf.startswith("base/") for use in report.uses for leaf in use.leaves)


@pytest.mark.slow
def test_an_axis_that_splits_the_work_on_a_row():
    mesh = zeroxla.make_mesh(nodes=2, tensor=2)
    report = explained(ZeroConfig(**SMALL), model=GPT.tiny(), mesh=mesh)
    assert any(use.lane == "tensor" for use in report.uses)


@pytest.mark.slow
def test_a_memory_budget():
    report = explained(ZeroConfig(memory=10**6, **SMALL), model=Llama.tiny())
    assert not [x for x in report.stalls if x.kind == "residual"]
