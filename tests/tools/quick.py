"""Keeps the tests quick: faster compilation and collection, and fewer values of a parameter.

LLVM would spend half of the suite's time on optimising programs that run for milliseconds. Tests
that ask what a program computes, and not how fast it runs, therefore compile without most of that.
The partitioner still runs, and so do the passes over HLO that could move or merge a collective.

    from tools.quick import quick_compilation  # noqa: F401
    pytestmark = pytest.mark.usefixtures("quick_compilation")

Programs that a test starts are given the environment variables QUICK instead.

`thinned` and `covering` leave values of a parameter to the slow tests (`make test-slow`). A run of
the tests says at its end how many rows it left out; `pytest --collect-only -q -m slow` lists them.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import pytest

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile with little optimisation of machine code for the rest of the module."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Let `gc.collect` look only through what the test makes.

    A test process holds millions of older objects; to look through them takes seconds.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def thinned(quick: Iterable[Any], *, slow: Iterable[Any], rows: bool = False) -> list[Any]:
    """Return the values of a parameter, and leave some of them to the slow tests.

    Args:
      quick: the values that every run of the tests takes.
      slow: the values that say much the same, or take long; they are marked slow.
      rows: each value is a tuple, with values of several parameters.
    """
    marked = [(value, ()) for value in quick] + [(value, pytest.mark.slow) for value in slow]
    return [pytest.param(*(v if rows else (v,)), marks=marks) for v, marks in marked]


def covering(
    values: Iterable[Any],
    settings: Callable[[Any], Iterable[Hashable]],
    *,
    cost: Callable[[Any], float] = lambda value: 1,
    rows: bool = False,
) -> list[Any]:
    """Return the values of a parameter, and mark as slow all but a few that have every setting.

    The choice is greedy: each time the first of the values that bring most settings not met yet for
    their cost. So it depends on the values themselves, and one that is added changes little.

    Args:
      values: the values, in the order in which they are returned.
      settings: returns the settings of a value, such as the items of its options.
      cost: returns the time that a value takes, in any unit.
      rows: each value is a tuple, with values of several parameters.
    """
    values = list(values)
    met = [frozenset(settings(value)) for value in values]
    missing, chosen = set().union(*met), set()
    while missing:
        best = max(range(len(values)), key=lambda i: len(met[i] & missing) / cost(values[i]))
        chosen.add(best)
        missing -= met[best]
    return [
        pytest.param(*(v if rows else (v,)), marks=() if i in chosen else pytest.mark.slow)
        for i, v in enumerate(values)
    ]
