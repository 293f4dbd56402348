"""Faster compilation for tests that ask what a program computes, not how fast it runs.

Half of the suite's time would be LLVM optimising programs that run for milliseconds. The
partitioner and the passes over HLO that could move or merge a collective run as ever.

    from tools.quick import quick_compilation  # noqa: F401
    pytestmark = pytest.mark.usefixtures("quick_compilation")

and, for the programs that a test starts, the variables QUICK. `thinned` leaves parameters that say
much the same to the slow tests.
"""

from collections.abc import Iterable, Iterator
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


def thinned(values: Iterable[Any], *, keep: int = 2, rows: bool = False) -> list[Any]:
    """Return parameters of which one of so many, the first included, is not marked slow.

    What repeats in them should not repeat with `keep`, or some of it is never kept.

    Args:
      values: of a parameter, or with `rows` tuples of values of several.
      keep: one of how many.
    """
    return [
        pytest.param(*(v if rows else (v,)), marks=pytest.mark.slow if i % keep else ())
        for i, v in enumerate(values)
    ]
