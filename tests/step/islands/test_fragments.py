"""Fragments of a device's shards, and the options of exchanges."""

import jax.numpy as jnp
import numpy as np
import pytest

from zeroxla import ZeroConfig
from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat
from zeroxla.step.islands.fragments import cut_by_units, cut_fragments

SHAPES = [(3, 4), None, (5,), (2, 2, 2)]


@pytest.mark.parametrize("num", [1, 3, 25])
def test_fragments_have_each_element_once(num):
    fragments = cut_fragments(SHAPES, num)
    sizes = [sum(run.stop - run.start for run in fragment.runs) for fragment in fragments]
    assert {fragment.size for fragment in fragments} == {max(sizes)}
    assert sum(sizes) == 12 + 5 + 8
    assert max(sizes) - min(sizes) <= 1
    shards = [jnp.arange(100.0 * i, 100.0 * i + np.prod(s or 2)).reshape(s or 2) for i, s in
              enumerate(SHAPES)]  # fmt: skip
    shards = dict(enumerate(shards))
    taken = np.concatenate([f.take(shards)[:n] for f, n in zip(fragments, sizes, strict=True)])
    np.testing.assert_array_equal(taken, np.concatenate([np.ravel(shards[i]) for i in (0, 2, 3)]))
    for fragment in fragments:
        shards = fragment.put(shards, -fragment.take(shards))
    assert sum(float(x.sum()) for x in shards.values()) == sum(
        sign * float(np.sum(np.arange(100 * i, 100 * i + n)))
        for i, n, sign in ((0, 12, -1), (1, 2, 1), (2, 5, -1), (3, 8, -1))
    )


def test_fragments_of_units_have_the_leaves_of_each_unit():
    one, two = cut_by_units([(3, 4), (2,), None, (5,)], ["a", "b", "b", "a"])
    assert (one.leaves, one.size) == ((0, 3), 17)
    assert (two.leaves, two.size) == ((1,), 2)


def test_more_fragments_than_elements():
    with pytest.raises(ValueError, match="fragments=26, and a device has 25 elements"):
        cut_fragments(SHAPES, 26)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (5, 1), (10, 3), (4, 4), (7, 5)])
def test_each_fragment_has_its_own_steps(every, fragments):
    outer = Outer(every=every, fragments=fragments)
    starts = [outer.start_of(number) for number in range(3 * fragments)]
    for fragment in range(fragments):
        at = starts[fragment::fragments]
        assert np.diff(at).tolist() == [every] * 2
    assert starts[fragments - 1] == every
    assert starts[0] > 0
    assert len(set(starts)) == 3 * fragments


BAD = {
    "every=0": ({"every": 0}, "every=0 must be a whole number of 1 or more"),
    "fragments": ({"every": 3, "fragments": 4}, "fragments=4, every=3.*: one fragment is"),
    "delay": ({"every": 3, "delay": 3}, "delay=3, every=3.*take a delay below 3"),
    "mixing": ({"mixing": 1.0}, r"mixing=1.0\): take a number in \[0, 1\)"),
    "optimizer": ({"optimizer": 0.7}, "optimizer=0.7.*optax"),
    "wire": ({"wire": 4}, "wire=4.*WireFormat"),
    "state": ({"state": "disk"}, 'state=\'disk\'.*"device" or "host"'),
    "stochastic": ({"wire": WireFormat(rounding="stochastic")}, "rounds stochastically"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_cannot_be(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Outer(**options)


def test_presets():
    streaming = ZeroConfig.streaming(every=50).outer
    assert (streaming.fragments, streaming.delay, streaming.mixing) == (10, 2, 0)
    few = ZeroConfig.streaming(every=10).outer
    assert (few.fragments, few.delay, few.mixing) == (10, 1, 0.5)
