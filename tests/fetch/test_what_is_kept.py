"""A step keeps shards, one unit and activations alive, and never the model.

The first part is a small version of benchmarks/memory.py, with the compiler's figures. XLA's
default CPU scheduler runs every instruction as early as it can, so a gather that nothing holds back
shows. The second part looks at the arrays kept from forward to backward, leaf by leaf.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.wire import collectives_on

import zeroxla
from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.runner import FetchRunner
from zeroxla.mesh.placement import Placement
from zeroxla.models import GPT
from zeroxla.program.trace import trace
from zeroxla.wire.routes import LeafSource, Route

pytestmark = pytest.mark.usefixtures("quick_compilation")
needs_barriers = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA on JAX 0.10's CPU backend drops the barriers that hold a gather back",
)

WIDTH, LENGTH, WORLD = 128, 4, 8
BLOCK_BYTES = 4 * (12 * WIDTH**2 + 13 * WIDTH)
BIASES = 1000  # a threshold between a block's biases and norms and its smallest kernel
KEEP = 10**9


@functools.cache
def compiled(layers, scan, *, threshold, keep=0):
    """Return the bytes of the state and the compiler's figures of a GPT's step, 4 tokens a device:
    a block's activations are a tenth of the block."""
    model = GPT.tiny(layers=layers, scan=scan, width=WIDTH, length=LENGTH, vocab=8)
    config = zeroxla.ZeroConfig(
        persistence_threshold=threshold, max_live_parameters=keep, max_reuse_distance=keep
    )
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((WORLD, LENGTH + 1), jnp.int32)}
    state = step.abstract_state(batch)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    state_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return state_bytes, zeroxla.inspect.memory(step.lower(state, batch).compile())


def growth_in_blocks(scan, **options):
    """How much temporaries grow from 2 to 4 layers, in blocks of parameters a layer."""
    (_, small), (_, large) = (compiled(layers, scan, **options) for layers in (2, 4))
    return (large.temp_bytes - small.temp_bytes) / (2 * BLOCK_BYTES)


@pytest.mark.slow
@needs_barriers
@pytest.mark.parametrize(
    ("scan", "threshold"),
    [
        pytest.param(False, 0, id="unrolled"),
        pytest.param(False, BIASES, id="unrolled, biases persistent"),
        pytest.param(True, BIASES, id="scanned, biases persistent"),
    ],
)
def test_temporaries_do_not_grow_by_gathered_leaves_with_the_layers(scan, threshold):
    # A layer more costs its gradient shard, 1/8 of the block, and its activations.
    assert 1 / WORLD <= growth_in_blocks(scan, threshold=threshold) < 1 / 2


@pytest.mark.slow
@needs_barriers
def test_leaves_kept_for_reuse_do_show_in_the_temporaries():
    assert growth_in_blocks(False, threshold=0, keep=KEEP) > 1


class OneBlock(nn.Module):
    """A perceptron whose leaves are read many times, unrolled."""

    uses: int

    @nn.compact
    def __call__(self, x):
        wide, narrow, norm = nn.Dense(16 * 384), nn.Dense(384), nn.LayerNorm()
        for _ in range(self.uses):
            x = x + narrow(nn.gelu(wide(norm(x))))
        return x


@pytest.mark.slow
@needs_barriers
@pytest.mark.parametrize("threshold", thinned([0], slow=[10**9]), ids=["fetched", "persistent"])
def test_gradient_of_a_leaf_is_summed_use_by_use(threshold):
    def temporaries(uses):
        step = zeroxla.make_step(
            OneBlock(uses),
            zeroxla.make_mesh(nodes=2, devices_per_node=4),
            optax.sgd(1e-3),
            loss=lambda apply, x, *, train: (apply(x) ** 2).mean(),
            config=zeroxla.ZeroConfig(persistence_threshold=threshold),
        )
        x = jax.ShapeDtypeStruct((4 * WORLD, 384), jnp.float32)
        program = step.lower(step.abstract_state(x), x).compile()
        return zeroxla.inspect.memory(program).temp_bytes

    assert temporaries(8) < 1.3 * temporaries(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scan", "threshold"), thinned([(True, BIASES)], slow=[(False, 0)], rows=True)
)
def test_arguments_are_the_state_over_the_world(scan, threshold):
    state_bytes, used = compiled(2, scan, threshold=threshold)
    assert used.argument_bytes == pytest.approx(state_bytes / WORLD, rel=0.03)
    assert used.alias_bytes == pytest.approx(state_bytes / WORLD, rel=0.03)


# ---------------------------------------------------------------- the tape

WIDE = 64
X_BD = jax.ShapeDtypeStruct((2, WIDE), jnp.float32)
W_DD = jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32)
W_LDD = jax.ShapeDtypeStruct((3, WIDE, WIDE), jnp.float32)


def tape_of(loss, w, **options):
    """Return the shapes of what forward leaves for backward; the leaf is never among it."""
    program, _ = trace(lambda w, x: jnp.sum(loss(w, x)), w, X_BD)
    leaf = program.inputs[0]
    placement = Placement(shape=w.shape, dim=w.ndim - 1)
    plan = make_plan(program, [leaf], [leaf], unit_elements=None, split_dims={leaf: placement.dim})
    alone = collectives_on(nodes=1, devices=1)
    runner = FetchRunner(plan, alone, {leaf: Route(placement=placement)}, FetchLimits(**options))
    forward = functools.partial(runner.forward, record=True)
    _, tape = jax.eval_shape(lambda w, x: forward({leaf: LeafSource(w)}, [x]), w, X_BD)
    return [x for x in jax.tree.leaves(tape) if x.size]


@jax.custom_vjp
def ruled(w, x):
    return x @ w


# The rule saves the leaf itself and copies of it in other layouts.
ruled.defvjp(
    lambda w, x: (x @ w, (w, w.T, 2 * w, x)),
    lambda saved, ct: (saved[3].T @ ct, ct @ saved[1] + ct @ saved[0].T + ct @ saved[2].T),
)


@jax.custom_jvp
def twice(w, x):
    return 2 * (x @ w)


twice.defjvp(
    lambda primals, tangents: (
        twice(*primals),
        2 * (tangents[1] @ primals[0] + primals[1] @ tangents[0]),
    )
)


def of_cond(w, x):
    return lax.cond(x[0, 0] > 0, lambda w, x: jnp.sin(x @ w), lambda w, x: x @ w.T, w, x)


def of_switch(w, x):
    branches = [lambda w, x: x @ w, lambda w, x: jnp.tanh(x @ (2 * w)), lambda w, x: x]
    return lax.switch(jnp.int32(x[0, 0]), branches, w, x)


def of_fori_loop(w, x):
    return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w.astype(jnp.bfloat16)), x)


def of_checkpoint(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w, x)


def of_jit(w, x):
    return jax.jit(lambda w, x: jnp.sin(x @ jax.jit(jnp.exp)(w)))(w, x)


def of_cond_in_jit(w, x):
    return jax.jit(of_cond)(w, x)


def of_layouts(w, x):
    return jnp.tanh(x @ w.reshape(WIDE // 2, 2, WIDE).transpose(1, 0, 2).reshape(WIDE, WIDE))


def of_norm(w, x):
    return x @ (w / jnp.linalg.norm(w, axis=0, keepdims=True))


def scanned(layer):
    def loss(w, x):
        return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    return loss


BODIES = {
    "custom_vjp": ruled,
    "custom_jvp": twice,
    "cond": of_cond,
    "switch": of_switch,
    "checkpoint": of_checkpoint,
    "jit": of_jit,
    "cond in jit": of_cond_in_jit,
    "layouts": of_layouts,
    "normalised": of_norm,
}


@pytest.mark.smoke
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_tape_holds_no_leaf(body):
    for array in tape_of(body, W_DD):
        assert array.size < W_DD.size, array


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_tape_of_a_scan_over_layers_holds_no_leaf(body):
    for array in tape_of(scanned(body), W_LDD):
        assert array.size < W_DD.size, array


def test_the_tape_of_a_loop_over_one_leaf_holds_no_leaf():
    for array in tape_of(of_fori_loop, W_DD):
        assert array.size < W_DD.size, array


def test_the_tape_holds_a_leaf_that_is_kept_for_reuse():
    tape = tape_of(ruled, W_DD, max_live=KEEP, max_reuse=KEEP)
    assert [x.size for x in tape if x.size >= W_DD.size] == [W_DD.size]
