"""A pipeline compiled for 8 H200 on any machine: stages send while they compute.

Nightly, where JAX's CUDA wheels are installed (the extra plan-gpu).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import zeroxla
from zeroxla import Pipeline, ZeroConfig
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.program import hlo

pytestmark = pytest.mark.nightly

MICROBATCHES = 4


def compiled(**options):
    try:
        mesh = target_mesh(H200, {"pipe": 2, "node": 1, "device": 4})
    except WheelsMissingError as error:
        pytest.skip(str(error))
    model = GPT.tiny(layers=2, width=256, heads=4, length=128, vocab=256)
    step = zeroxla.make_step(
        Pipeline.from_model(model, **options),
        mesh,
        optax.adamw(1e-3),
        config=ZeroConfig(compute_dtype="bfloat16", persistence_threshold=0),
        microbatches=MICROBATCHES,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((MICROBATCHES * 4, 129), jnp.int32)}
    return step.lower(step.abstract_state(batch), batch).compile().as_text()


def beside(text):
    """Return (pairs of devices, the conditionals between start and done) of every permute."""
    module = hlo.parse(text)
    found = []
    for permute in hlo.collectives(module):
        if permute.kind != "collective-permute":
            continue
        assert permute.asynchronous, f"{permute.name} runs alone"
        order = next(
            list(scope.values()) for scope in module.computations.values() if permute.name in scope
        )
        names = [instruction.name for instruction in order]
        start = names.index(permute.name)
        done = next(
            i
            for i, x in enumerate(order)
            if x.opcode == "collective-permute-done" and x.operands[0] == permute.name
        )
        between = [x for x in order[start:done] if x.opcode == "conditional"]
        found.append((permute.pairs, permute.count, between))
    return found


@pytest.mark.parametrize(
    ("options", "ticks"),
    [({}, MICROBATCHES + 2), ({"schedule": "zb-h1"}, 3 * MICROBATCHES + 2)],
    ids=["1f1b", "zb-h1"],
)
def test_permutes_are_asynchronous_and_run_beside_forwards_and_backwards(options, ticks):
    text = compiled(**options)
    assert "is_scheduled=true" in text.partition("\n")[0]
    permutes = beside(text)
    down, up = (tuple((a + s, 4 - s + a) for a in range(4)) for s in (0, 4))
    assert {frozenset(pairs) for pairs, _, _ in permutes} == {frozenset(down), frozenset(up)}
    for pairs, count, between in permutes:
        assert count == ticks
        assert between, f"nothing runs beside {pairs}"
