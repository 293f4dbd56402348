"""Random programs of slices, concatenations, reshapes and products compute the same in parts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.split.part_program import PartProgram, leaf_dims
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.tensor_plan import make_tensor_plan

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS = 2


def divisor(size, number):
    """Return a divisor of a size, picked by any number."""
    found = [n for n in range(1, size + 1) if size % n == 0]
    return found[number % len(found)]


class Steps:
    """The steps of random programs, on an array [ROWS, n]; each makes the leaves it needs."""

    def __init__(self, leaves=None):
        self.given, self.leaves = leaves, []

    def leaf(self, *shape):
        if self.given is None:
            draw = np.random.default_rng(len(self.leaves)).normal(size=shape)
            self.leaves.append((draw / math.sqrt(shape[0])).astype(np.float32))
            return jnp.asarray(self.leaves[-1])
        self.leaves.append(None)
        return self.given[len(self.leaves) - 1]

    def scaled(self, x, a, b):
        return x * self.leaf(x.shape[1])

    def product(self, x, a, b):
        return x @ self.leaf(x.shape[1], (4, 6, 8, 12)[a % 4])

    def slice(self, x, a, b):
        start = a % x.shape[1]
        return x[:, start : start + 1 + b % (x.shape[1] - start)]

    def swapped(self, x, a, b):
        at = a % x.shape[1]
        return jnp.concatenate([x[:, at:], x[:, :at]], axis=1)

    def doubled(self, x, a, b):
        return jnp.concatenate([x, -x], axis=1) if x.shape[1] <= 16 else x

    def both(self, x, a, b):
        """A slice and a product of the rest, one after the other again."""
        at = 1 + a % x.shape[1]
        return jnp.concatenate([jnp.tanh(x[:, :at]), self.product(x, b, a)], axis=1)

    def padded(self, x, a, b):
        return jnp.pad(x, ((0, 0), (a % 3, b % 3)))

    def halves(self, x, a, b):
        even = x[:, : x.shape[1] // 2 * 2]
        first, second = jnp.split(even, 2, axis=1)
        return jnp.tanh(first) * second if first.shape[1] else x

    def turned(self, x, a, b):
        """The dim as a product, whose factors change places."""
        n = divisor(x.shape[1], a)
        y = x.reshape(ROWS, n, -1) * self.leaf(n)[:, None]
        return y.transpose(0, 2, 1).reshape(ROWS, -1) if b % 2 else y.reshape(ROWS, -1)

    def depthwise(self, x, a, b):
        kernel = self.leaf(1, 1, x.shape[1])
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            x[:, None], kernel, (1,), [(0, 0)], None, None, numbers, x.shape[1]
        )[:, 0]


NAMES = [name for name, x in vars(Steps).items() if callable(x) and not name.startswith("__")]
NAMES.remove("leaf")
STEP = st.tuples(st.sampled_from(NAMES), st.integers(0, 30), st.integers(0, 30))


def check_program(steps, parts):
    def run(steps_of, x):
        for name, a, b in [("product", 3, 0), *steps, ("product", 1, 0)]:
            x = getattr(steps_of, name)(x, a, b)
        return x

    x = np.random.default_rng(9).normal(size=(ROWS, 6)).astype(np.float32)
    made = Steps()
    expected = run(made, jnp.asarray(x))
    leaves = leaf_dims(made.leaves)

    def function(params, carry, x):
        return run(Steps(params), x), carry

    program = PartProgram.of(function, leaves, made.leaves, {}, x, num_whole=1)
    plan = make_tensor_plan([program], leaves, list(map(str, range(len(leaves)))), parts)
    assert program.needed_whole() is None
    axis = SplitAxis(parts=parts, name="parts")

    def part(_):
        taken = [axis.take(jnp.asarray(y), row.dims) for y, row in zip(made.leaves, plan.rows)]
        for y, row in zip(taken, plan.rows, strict=True):
            assert y.shape == row.part_shape(parts)
        return program(axis, taken, {}, x)[0]

    found = jax.vmap(part, axis_name="parts")(jnp.arange(parts))
    for mine in found:
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num", thinned([3], slow=[50]))
def test_programs_in_parts(num):
    given_programs = given(st.lists(STEP, min_size=2, max_size=7), st.sampled_from([2, 4]))
    settings(max_examples=num, deadline=None, derandomize=True)(given_programs(check_program))()
