"""Fragments of a device's shards, the options of exchanges, and the link between threads."""

import concurrent.futures

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat
from zeroxla.step.islands.fragments import cut_fragments
from zeroxla.step.islands.link import LocalLink

SHAPES = [(3, 4), None, (5,), (2, 2, 2)]


@pytest.mark.parametrize(("num", "multiple"), [(1, 1), (1, 8), (3, 4), (25, 2)])
def test_fragments_have_each_element_once(num, multiple):
    fragments = cut_fragments(SHAPES, num, multiple)
    sizes = [fragment.size - fragment.num_padding for fragment in fragments]
    assert sum(sizes) == 12 + 5 + 8
    assert max(sizes) - min(sizes) <= 1
    assert all(f.size % multiple == 0 and f.num_padding < multiple for f in fragments)
    shards = [jnp.arange(100.0 * i, 100.0 * i + np.prod(s or 2)).reshape(s or 2) for i, s in
              enumerate(SHAPES)]  # fmt: skip
    shards = dict(enumerate(shards))
    taken = np.concatenate([f.take(shards)[: f.size - f.num_padding] for f in fragments])
    np.testing.assert_array_equal(taken, np.concatenate([np.ravel(shards[i]) for i in (0, 2, 3)]))
    for fragment in fragments:
        shards = fragment.put(shards, -fragment.take(shards))
    assert sum(float(x.sum()) for x in shards.values()) == sum(
        sign * float(np.sum(np.arange(100 * i, 100 * i + n)))
        for i, n, sign in ((0, 12, -1), (1, 2, 1), (2, 5, -1), (3, 8, -1))
    )


def test_more_fragments_than_elements():
    with pytest.raises(ValueError, match="fragments=26, and a device has 25 elements"):
        cut_fragments(SHAPES, 26, 1)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (5, 1), (10, 3), (4, 4), (7, 5)])
def test_each_fragment_has_its_own_steps(every, fragments):
    outer = Outer(every=every, fragments=fragments)
    starts = [outer.starts_at(step) for step in range(1, 3 * every + 1)]
    for fragment in range(fragments):
        at = [step for step, found in enumerate(starts, 1) if found == fragment]
        assert len(at) == 3
        assert np.diff(at).tolist() == [every] * 2
    assert starts[every - 1] == 0
    assert sum(found is not None for found in starts) == 3 * fragments


BAD = {
    "every=0": ({"every": 0}, "every=0 must be a whole number of 1 or more"),
    "fragments": ({"every": 3, "fragments": 4}, "fragments=4, every=3.*: one fragment is"),
    "delay": ({"every": 3, "delay": 3}, "delay=3, every=3.*take a delay below 3"),
    "mixing": ({"mixing": 1.0}, r"mixing=1.0\): take a number in \[0, 1\)"),
    "optimizer": ({"optimizer": 0.7}, "optimizer=0.7.*optax"),
    "wire": ({"wire": 4}, "wire=4.*WireFormat"),
    "stochastic": ({"wire": WireFormat(rounding="stochastic")}, "rounds stochastically"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_cannot_be(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Outer(**options)


def test_mixing_keeps_what_is_learned_during_an_exchange():
    assert Outer().mixing == 0
    assert Outer(delay=2).mixing == 0.5
    assert Outer(delay=2, mixing=0).mixing == 0
    assert isinstance(Outer().optimizer, optax.GradientTransformation)


def test_a_local_link_gives_each_island_its_part():
    links = LocalLink.make(3)

    def run(link):
        one = link.swap("a", [f"{link.index}>{to}".encode() for to in range(3)])
        return one, link.swap("b", [b"x" * link.index] * 3)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for i, (one, two) in enumerate(pool.map(run, links)):
            assert one == [f"{source}>{i}".encode() for source in range(3)]
            assert two == [b"", b"x", b"xx"]


def test_an_island_that_sends_nothing_is_named():
    link = LocalLink.make(2, timeout=0.1)[0]
    with pytest.raises(TimeoutError, match="island 1 has not sent 'a' within 0 s; see what its"):
        link.swap("a", [b"", b""])
