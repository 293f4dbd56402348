"""A plan counts what owners of matrices compute and receive."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.models import GPT

BATCH = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
SHAPE = {"node": 2, "device": 4}


def planned(**options):
    model = GPT.tiny(layers=2, width=32, scan=False)
    config = ZeroConfig(**options)
    return zeroxla.plan(model, SHAPE, BATCH, optimizer=optax.contrib.muon(0.02), config=config)


def test_bytes_and_time_of_owners_are_in_the_plan():
    plan, without = planned(), planned(owners=False)
    (row,) = (row for row in plan.comms.rows if row.phase == "owners")
    assert (row.kind, row.count) == ("all-to-all", 2)
    step = zeroxla.make_step(
        GPT.tiny(layers=2, width=32, scan=False),
        zeroxla.make_mesh(nodes=2, devices_per_node=4),
        optax.contrib.muon(0.02),
    )
    step.abstract_state(BATCH)
    assert row.received_bytes == pytest.approx(step.describe().owners.received_bytes)
    assert not [row for row in without.comms.rows if row.phase == "owners"]
    assert plan.time.seconds > without.time.seconds
