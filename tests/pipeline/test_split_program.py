"""A program in two parts computes what the whole one does, and nothing twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tools.products import products
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.pipeline.split_program import SplitProgram, split
from zeroxla.program import compat
from zeroxla.program.trace import trace

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, WIDTH, ROWS = 4, 16, 8


def leaves() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    up = rng.normal(size=(LAYERS, WIDTH, 2 * WIDTH)) / 4
    down = rng.normal(size=(LAYERS, 2 * WIDTH, WIDTH)) / 4
    return jnp.asarray(up), jnp.asarray(down), jnp.zeros((LAYERS, WIDTH))


def block(x: jax.Array, layer: Any) -> jax.Array:
    up, down, bias = layer
    return x + jnp.tanh(x @ up) @ down + bias


def scanned(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, layer: (block(x, layer), None), x, params)[0]


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda p, i=i: p[i], params))
    return x


def shared(params: Any, x: jax.Array) -> jax.Array:
    """One layer's products in every turn, whose gradients a carry adds up."""
    up, down, bias = params
    return lax.scan(lambda x, b: (block(x, (up[0], down[0], b)), None), x, bias)[0]


def remat(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, layer: (jax.checkpoint(block)(x, layer), None), x, params)[0]


def nested(params: Any, x: jax.Array) -> jax.Array:
    """Loops in a loop, whose turns also return something."""

    def turn(x: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
        return block(x, layer), x.sum()

    twice = jax.tree.map(lambda p: p.reshape(2, LAYERS // 2, *p.shape[1:]), params)
    x, sums = lax.scan(lambda x, layers: lax.scan(turn, x, layers), x, twice)
    return x + sums.sum()


def keys(params: Any, x: jax.Array) -> jax.Array:
    """Dropout, whose keys are split in the loop."""

    def turn(carry: Any, layer: Any) -> tuple[Any, None]:
        x, key = carry
        key, mine = jax.random.split(key)
        kept = jax.random.bernoulli(mine, 0.5, x.shape)
        return (block(jnp.where(kept, x, 0.0), layer), key), None

    return lax.scan(turn, (x, jax.random.key(1)), params)[0][0]


STAGES = {f.__name__: f for f in (scanned, unrolled, shared, remat, nested, keys)}


def quick(*names: str) -> list[Any]:
    """Return all stages, and leave to the slow tests those that are not named."""
    return thinned(names, slow=[name for name in STAGES if name not in names])


def halves(stage: Callable[..., jax.Array]) -> tuple[SplitProgram, list[jax.Array]]:
    """Split a backward into the gradient of the input, and those of the leaves."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)))
    args = leaves(), x, jnp.cos(x)

    def backward(params: Any, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, Any]:
        of_leaves, of_x = jax.vjp(stage, params, x)[1](ct)
        return of_x, of_leaves

    program, _ = trace(backward, *args, opened=compat.backward_jaxpr)
    return split(program, [0], range(1, 4)), jax.tree.leaves(args)


@pytest.mark.parametrize("name", quick("scanned", "remat"))
def test_both_parts_compute_the_whole_and_no_product_twice(name):
    both, args = halves(STAGES[name])

    def env(args: list[jax.Array]) -> dict[Any, jax.Array]:
        return dict(zip(both.program.inputs, args, strict=True))

    first = jax.jit(lambda args: both.run_first(env(args)))
    second = jax.jit(lambda args, kept: both.run_second(env(args), kept))
    of_x, kept = first(args)
    for found, expected in zip([*of_x, *second(args, kept)], both.program(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)

    whole = products(lambda args: both.program(*args), args)
    early = products(lambda args: both.run_first(env(args)), args)
    late = products(lambda args, kept: both.run_second(env(args), kept), args, kept)
    assert early + late == whole
    # Each block has two products that give gradients of leaves.
    assert late == LAYERS * 2 * ROWS * WIDTH * 2 * WIDTH


@pytest.mark.parametrize("name", quick("shared"))
def test_a_first_stage_leaves_only_the_last_products(name):
    """It has no gradient of its input, and takes the gradient through its layers in the first part
    as other stages do."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)))
    args = leaves(), x, jnp.cos(x)

    def backward(params: Any, x: jax.Array, ct: jax.Array) -> Any:
        return jax.vjp(lambda params: STAGES[name](params, x), params)[1](ct)[0]

    program, _ = trace(backward, *args, opened=compat.backward_jaxpr)
    both = split(program, [], range(3), early=True)
    flat = jax.tree.leaves(args)

    def env(args: list[jax.Array]) -> dict[Any, jax.Array]:
        return dict(zip(both.program.inputs, args, strict=True))

    _, kept = jax.jit(lambda args: both.run_first(env(args)))(flat)
    second = jax.jit(lambda args, kept: both.run_second(env(args), kept))
    for found, expected in zip(second(flat, kept), program(*flat), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    whole = products(lambda args: both.program(*args), flat)
    early = products(lambda args: both.run_first(env(args)), flat)
    late = products(lambda args, kept: both.run_second(env(args), kept), flat, kept)
    assert early + late == whole
    assert late == LAYERS * 2 * ROWS * WIDTH * 2 * WIDTH


def test_effects_run_once_where_what_they_read_is_known():
    seen: list[tuple[str, float]] = []

    def fun(x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda x: seen.append(("x", float(x))), x)
        jax.debug.callback(lambda ct: seen.append(("ct", float(ct))), ct)
        return jnp.sin(x), jnp.cos(x) * ct

    program, _ = trace(fun, 1.0, 2.0)
    both = split(program, [0], [1], unknown=program.inputs[1:])

    def env(ct: float) -> dict[Any, jax.Array]:
        return dict(zip(program.inputs, (jnp.array(1.0), jnp.array(ct)), strict=True))

    _, kept = both.run_first(env(0.0))
    jax.effects_barrier()
    assert seen == [("x", 1.0)]
    (found,) = both.run_second(env(2.0), kept)
    jax.effects_barrier()
    assert seen == [("x", 1.0), ("ct", 2.0)]
    np.testing.assert_allclose(found, np.cos(1.0) * 2, rtol=1e-6)


def test_what_both_parts_need_is_handed_on_once():
    both, _ = halves(unrolled)
    assert len(both.crossing) == len(set(both.crossing))
    assert not set(both.crossing) & set(both.program.inputs)
    made = [v for eq, outs in both.first.items() for v in (eq.outputs[i] for i in outs)]
    assert set(both.crossing) <= set(made)


def test_what_is_kept_is_what_products_need():
    """A product keeps its two operands; the gradient of a bias, which is a sum, is done at once."""
    both, args = halves(scanned)
    env = dict(zip(both.program.inputs, args, strict=True))
    _, kept = jax.eval_shape(lambda: both.run_first(env))
    elements = sum(x.size for x in jax.tree.leaves(kept))
    assert elements == LAYERS * (ROWS * 6 * WIDTH + WIDTH)
