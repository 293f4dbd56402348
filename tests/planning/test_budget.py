"""Plans with a memory budget: the same choice as a step makes, from live ranges alone."""

import jax
import pytest
from tools.quick import thinned

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.models import GPT

MESH = {"node": 1, "device": 8}
BATCH = {"tokens": jax.ShapeDtypeStruct((64, 1025), "int32")}
MODEL = GPT(vocab=512, length=1024, layers=4, width=768, heads=12)


def planned(**options):
    return zeroxla.plan(MODEL, MESH, BATCH, config=ZeroConfig(compute_dtype="bfloat16", **options))


@pytest.fixture(scope="module")
def plain():
    return planned()


@pytest.mark.parametrize("share", thinned([0.4], slow=[0.7]))
def test_a_plan_fits_its_budget_with_the_work_that_is_done_twice(plain, share):
    rest = plain.memory.total_bytes - plain.memory.temporary_bytes
    budget = rest + int(share * plain.memory.temporary_bytes)
    found = planned(memory=budget)
    assert 0.9 * budget < found.memory.total_bytes <= budget
    assert found.fit.best.num_bytes == found.memory.total_bytes
    keeping = found.fit.best.keeping
    assert 0 < keeping.share_again < 0.34
    # Computing again comes on top of the model's own work. It can still make a step faster, because
    # a value that is not kept is neither written to memory nor read.
    more_s = found.time.seconds / plain.time.seconds - 1
    assert -0.15 < more_s < 1.5 * keeping.share_again + 0.02
    assert any("% of all" in note for note in found.notes())


@pytest.mark.slow
def test_less_memory_never_takes_less_work(plain):
    rest = plain.memory.total_bytes - plain.memory.temporary_bytes
    shares = (0.8, 0.6, 0.4)
    budgets = [rest + int(share * plain.memory.temporary_bytes) for share in shares]
    seconds = [planned(memory=budget).fit.best.seconds for budget in budgets]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_a_plan_that_cannot_fit_says_so(plain):
    found = planned(memory=plain.memory.total_bytes - plain.memory.temporary_bytes + 1000)
    assert found.fit.best is None
    assert "does not fit" in found.notes()[1]


def test_all_of_a_device_is_what_jax_takes_of_it(plain):
    found = planned(memory="device")
    assert found.fit.total_bytes == int(found.target.device.usable_bytes)
    assert found.memory.total_bytes == plain.memory.total_bytes


@pytest.mark.slow
def test_a_search_with_a_budget_does_not_try_remat():
    found = zeroxla.search_plans(
        GPT.tiny(),
        1,
        2,
        {"tokens": jax.ShapeDtypeStruct((16, 17), "int32")},
        config=ZeroConfig(memory="1GB"),
        zeros=("zero3",),
        pipes=(1, 2),
        axes=({},),
    )
    assert [row.choice.remat for row in found.found] == [None]
    assert any("of a pipeline is not supported" in why for why in found.refused)
