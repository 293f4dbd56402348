"""The search for what fits, with measured bytes that are made up."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.step.memory.budget_search import keeper_of, search_budget
from zeroxla.step.memory.device_facts import rates_of
from zeroxla.step.memory.step_memory import measured

pytestmark = pytest.mark.usefixtures("quick_compilation")

MB = 10**6


class Layers(nn.Module):
    """Layers that are written out, whose leaves all stay whole."""

    @nn.compact
    def loss(self, batch, *, train):
        x = batch["x"]
        for _ in range(6):
            x = x + nn.Dense(16)(jnp.sin(nn.Dense(32)(x)))
        return jnp.mean(x**2)


@pytest.fixture(scope="module")
def programs():
    """Programs of a model whose segments can be cut, and their arguments."""
    config = ZeroConfig(memory="1GB", max_live_parameters=0)

    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    step = zeroxla.make_step(Layers(), mesh, optax.sgd(0.1), config=config)
    batch = {"x": jax.ShapeDtypeStruct((2048, 16), np.float32)}
    return step.programs, step.abstract_state(batch), step.batches.shapes(batch)


def search(programs, total, unseen):
    """Search with bytes that are the keeper's own and, by plan, some that it does not see. Return
    what was found, and the plan and the bytes of each try."""
    programs, state, batch = programs
    tried = []

    def measure(programs, budget):
        measured(programs, state, batch)
        keeper = keeper_of(programs, budget)
        counted = (budget.newest or keeper.everything()).num_bytes
        plan = budget.only or 0
        tried.append((plan, int(counted + unseen(plan, counted))))
        return tried[-1][1], tried[-1][1]

    fit, _ = search_budget(programs, total, rates_of(programs.mesh, programs.config), measure)
    return fit, tried


def test_each_way_to_cut_has_bytes_of_its_own_that_the_keeper_does_not_see(programs):
    _, ((_, most),) = search(programs, 10**12, lambda plan, _: 0)
    total = most // 2 + 5 * MB
    fit, tried = search(programs, total, lambda plan, _: 0 if plan else 5 * MB)
    # All that backward reads fits once the segment is cut. That is known after one try.
    assert tried[-1] == (1, most)
    assert len(tried) == 3
    assert fit.best.seconds == 0


@pytest.mark.parametrize("falls", [1.0, 0.7, 0.5])
def test_bytes_that_fall_less_than_what_is_kept_are_aimed_at(programs, falls):
    _, ((_, most),) = search(programs, 10**12, lambda plan, _: 0)
    total = int(0.75 * most)
    fit, tried = search(programs, total, lambda plan, counted: (1 - falls) * (most - counted))
    assert 0.8 * total < fit.best.num_bytes <= total
    assert len(tried) <= 4
