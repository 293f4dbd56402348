"""`PagePool` gives out memory again once nothing refers to it, and holds no more than was in
use."""

import gc

import jax
import numpy as np
import pytest
from tools.quick import quick_collection  # noqa: F401

from zeroxla.offload.disk.pages import ALIGNMENT, PagePool, aligned


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_it_is_let_go():
    pool = PagePool()
    first = pool.take(3 * ALIGNMENT - 5)
    assert first.nbytes == 3 * ALIGNMENT
    where = address(first)
    assert where % ALIGNMENT == 0
    second = pool.take(3 * ALIGNMENT)
    assert address(second) != where
    del first
    assert address(pool.take(3 * ALIGNMENT)) == where


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("kept", ["view", "device"])
def test_memory_that_something_refers_to_is_nobody_elses(kept):
    pool = PagePool()
    array = pool.take(4 * ALIGNMENT)
    array[:] = 7
    where = address(array)
    view = array[: 3 * ALIGNMENT].view(np.float32).reshape(2, -1)
    if kept == "device":
        view = jax.device_put(view, jax.devices()[0], may_alias=True)
        assert view.unsafe_buffer_pointer() == where  # no copy
    before = np.array(view)
    del array
    gc.collect()
    pool.take(4 * ALIGNMENT)[:] = 9
    np.testing.assert_array_equal(np.array(view), before)
    del view
    gc.collect()
    taken = [address(pool.take(4 * ALIGNMENT)) for _ in range(2)]
    assert where in taken


def test_no_more_is_kept_than_was_used():
    pool = PagePool()
    held = [pool.take(n * ALIGNMENT) for n in (1, 2, 3)]
    held.clear()
    whole = pool.take(6 * ALIGNMENT)  # of the size of all: none of them is kept beside it
    assert pool.kept_bytes == 0
    del whole
    assert pool.kept_bytes == 6 * ALIGNMENT
    pool.take(5)
    assert pool.kept_bytes == ALIGNMENT  # the six were given back, the one has come back
    held = pool.take(ALIGNMENT)
    pool.clear()
    del held
    assert pool.kept_bytes == 0


def test_lengths_are_aligned():
    assert [aligned(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        ALIGNMENT,
        ALIGNMENT,
        2 * ALIGNMENT,
    ]
