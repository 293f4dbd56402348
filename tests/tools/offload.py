"""Small steps with offloaded states, and comparisons of these, for the tests of offload."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from tools.zoo.base import leaves
from zeroxla import Offload, ZeroConfig
from zeroxla.models import GPT, Llama

_SHAPES = {"table": (64, 32), "a": (32, 128), "b": (128, 32), "c": (32, 128), "d": (128, 32)}


def _loss(params, batch, key):
    x = params["table"][batch["tokens"]]
    for name in _SHAPES:
        x = x if name == "table" else jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


MODELS = {
    "functions": lambda: (leaves(**_SHAPES), _loss),
    "scanned": lambda: GPT.tiny(width=64),
    "unrolled": lambda: GPT.tiny(width=64, scan=False),
    "nnx": lambda: Llama.tiny(),
}
SMALL = {"persistence_threshold": 300, "quantize_threshold": 300}


def batch(rows=16):
    return {"tokens": np.random.default_rng(0).integers(0, 60, (rows, 17)).astype(np.int32)}


def make_step(mesh, offload, model="scanned", preset="zero3", optimizer=None, **options):
    """Return a step. All tests of a process share the steps without offload."""
    if offload == Offload():
        is_quick = jax.config.read("jax_disable_most_optimizations")
        return _plain(mesh, model, preset, optimizer, is_quick, **options)
    return _step(mesh, offload, model, preset, optimizer, **options)


@functools.cache
def _plain(mesh, model, preset, optimizer, is_quick, **options):
    return _step(mesh, Offload(), model, preset, optimizer, **options)


def _step(mesh, offload, model, preset, optimizer, **options):
    config = getattr(ZeroConfig, preset)(offload=offload, **SMALL, **options)
    optimizer = optimizer or optax.adamw(1e-2)
    return zeroxla.make_step(MODELS[model](), mesh, optimizer, config=config)


def make(mesh, offload, model="scanned", preset="zero3", **options):
    step = make_step(mesh, offload, model, preset, **options)
    return step, step.init(jax.random.key(0), batch())


def taken(step, state, steps):
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def trained(state):
    return state.params, state.opt_state


def assert_same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


HAS_BARRIERS = jax.__version_info__ >= (0, 11)


def assert_alike(a, b):
    """Check that steps with different update programs give the same bits.

    In JAX 0.10 they need only agree to rounding. There XLA on CPUs drops the barriers that keep
    gradients apart from the values computed from them.
    """
    if HAS_BARRIERS:
        return assert_same(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Adam moves an element with hardly any gradient by the learning rate one way or the other.
        atol = 0 if np.ndim(x) == 0 else 1e-2
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=atol)
