"""Programs whose repeated blocks are rolled into loops compute the same, and what does not repeat
stays as it is."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.program.likeness import likeness
from zeroxla.program.repeats import Repeat, repeats
from zeroxla.program.roll import block_of, roll, stacked_values
from zeroxla.program.trace import trace

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)


def leaves(count, *shape):
    return [jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32) for _ in range(count)]


def rolled(fun, leaves, *data, kinds=None):
    """The program of fun(leaves, *data) -> scalar, and the rolled one."""
    program, _ = trace(fun, leaves, *data)
    kinds = kinds or [()] * len(leaves)
    return program, roll(program, dict(zip(program.inputs, kinds)))


def loops(program):
    return [eq.params["length"] for eq in program.equations if eq.name == "scan"]


def check_same(programs, leaves, *data):
    """Values and gradients, of all leaves."""
    found = []
    for program in programs:
        args = jax.tree.leaves(data)
        grad = jax.value_and_grad(lambda mine, p=program, args=args: p(*mine, *args)[0])
        found.append(jax.jit(grad)(leaves))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)


def test_a_chain_of_products():
    ws = leaves(7, 4, 4)

    def fun(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x)

    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == [7]
    check_same(programs, ws, X)
    producers = {v: eq for eq in programs[1].equations for v in eq.outputs}
    (scan,) = (eq for eq in programs[1].equations if eq.name == "scan")
    stacks = [stacked_values(a, producers) for a in scan.inputs]
    assert tuple(programs[1].inputs[:7]) in stacks


def test_two_rows_with_other_equations_around_them():
    ws = [*leaves(3, 4, 4), *leaves(1, 4, 6), *leaves(4, 6, 6)]

    def fun(ws, x):
        for w in ws[:3]:
            x = jnp.tanh(x @ w)
        x = jnp.sin(x @ ws[3])
        for w in ws[4:]:
            x = x - x @ w
        return jnp.sum(x)

    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == [3, 4]
    check_same(programs, ws, X)


def test_what_is_read_of_every_block_is_stacked():
    ws = leaves(4, 4, 4)

    def fun(ws, x):
        seen = []
        for w in ws:
            x = jnp.tanh(x @ w)
            seen.append(x)
        return sum(jnp.sum(s) * i for i, s in enumerate(seen))

    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == [4]
    check_same(programs, ws, X)
    producers = {v: eq for eq in programs[1].equations for v in eq.outputs}
    blocks = {b for v in producers if (b := block_of(v, producers)) is not None}
    assert {number for _, number in blocks} == {0, 1, 2}  # the last one's is the carry


def test_blocks_may_differ_in_constants_and_keys():
    ws = leaves(4, 4, 4)

    def fun(ws, x, key):
        for i, w in enumerate(ws):
            kept = jax.random.bernoulli(jax.random.fold_in(key, 17 * i), 0.7, x.shape)
            x = x + (0.5 + i) * jnp.tanh(x @ w) * kept
        return jnp.sum(x)

    programs = rolled(fun, ws, X, jax.random.key(1))
    assert loops(programs[1]) == [4]
    check_same(programs, ws, X, jax.random.key(1))


def test_what_all_blocks_read_alike_is_computed_once():
    """A mask of the batch, and a first block that makes an array for all."""
    ws = leaves(5, 4, 4)

    def fun(ws, x):
        x, shared = x @ ws[0], jnp.cos(x @ ws[0])
        mask = x0 > 0
        for w in ws[1:]:
            x = jnp.where(mask, jnp.tanh(x @ w) + shared, x)
        return jnp.sum(x)

    x0 = X
    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == [4]
    check_same(programs, ws, X)


def test_a_first_block_that_the_others_read_is_left_out():
    ws = leaves(5, 4, 4)

    def fun(ws, x):
        first = None
        for w in ws:
            y = jnp.tanh(x @ w)
            first = y if first is None else first
            x = x + y * first
        return jnp.sum(x)

    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == [4]
    check_same(programs, ws, X)


@pytest.mark.parametrize("case", ["no chain", "shared", "kinds"])
def test_what_is_no_row_of_blocks_stays(case):
    ws = leaves(4, 4, 4)

    def no_chain(ws, x):
        return jnp.sum(jnp.concatenate([jnp.tanh(x @ w) for w in ws]))

    def shared(ws, x):
        for _ in range(4):
            x = jnp.tanh(x @ ws[0])
        return jnp.sum(x) + sum(map(jnp.sum, ws))

    def chain(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    fun = {"no chain": no_chain, "shared": shared, "kinds": chain}[case]
    kinds = [0, 1, 2, 3] if case == "kinds" else None
    programs = rolled(fun, ws, X, kinds=kinds)
    assert loops(programs[1]) == []


def test_blocks_that_read_all_before_them():
    """The program computes the same, whether a loop was found or not."""
    ws = leaves(5, 4, 4)

    def fun(ws, x):
        seen = [x]
        for w in ws:
            seen.append(jnp.tanh(sum(seen) @ w))
        return jnp.sum(seen[-1])

    check_same(rolled(fun, ws, X), ws, X)


def test_rolled_leaves_agree_in_their_kind():
    """As where the first blocks are frozen."""
    ws = leaves(6, 4, 4)

    def fun(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    programs = rolled(fun, ws, X, kinds=[0, 0, 0, 1, 1, 1])
    assert loops(programs[1]) == [3, 3]
    check_same(programs, ws, X)


def of_rule(scale):
    """A function whose derivative is given by a rule that knows `scale`."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (scale * ct * jnp.cos(x),))
    return f


@pytest.mark.parametrize(("scales", "expected"), [((1, 1, 1), [3]), ((1, 2, 3), [])])
def test_custom_derivatives_are_compared_by_what_they_compute(scales, expected):
    """The forward is the same, and so are the types of all parameters."""
    ws = leaves(3, 4, 4)

    def fun(ws, x):
        for w, scale in zip(ws, scales, strict=True):
            x = of_rule(scale)(x @ w)
        return jnp.sum(x)

    programs = rolled(fun, ws, X)
    assert loops(programs[1]) == expected
    check_same(programs, ws, X)


def test_likeness_looks_into_loops_and_checkpoints():
    def fun(ws, x):
        for w, n in zip(ws, (2, 2, 3), strict=True):
            x = jax.checkpoint(lambda x, w=w, n=n: jax.lax.fori_loop(0, n, lambda i, y: y @ w, x))(
                x
            )
        return jnp.sum(x)

    program, _ = trace(fun, leaves(3, 4, 4), X)
    a, b, c = (likeness(eq) for eq in program.equations if eq.name == "remat2")
    assert a == b != c


@hypothesis.given(st.lists(st.integers(0, 2), min_size=2, max_size=14))
def test_repetitions_are_those_of_a_search_by_brute_force(keys):
    """Of each period, every longest stretch that equals itself moved by it."""
    found = list(repeats(keys))
    expected = set()
    for period in range(1, len(keys) // 2 + 1):
        same = [a == b for a, b in zip(keys, keys[period:])]
        for start in range(len(same)):
            if same[start] and (start == 0 or not same[start - 1]):
                length = next((i for i, s in enumerate(same[start:]) if not s), len(same) - start)
                if length >= period:
                    expected.add(Repeat(start, period, length // period + 1, length % period))
    assert set(found) == expected
    assert [r.saved for r in found] == sorted((r.saved for r in found), reverse=True)
