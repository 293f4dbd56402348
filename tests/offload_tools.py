"""What the tests of offload share: small steps, and what a state of theirs holds."""

import jax
import numpy as np
import optax

import zeroxla
from models import GPT, Llama
from zeroxla import ZeroConfig

MODELS = {
    "scanned": lambda: GPT.tiny(width=64),
    "unrolled": lambda: GPT.tiny(width=64, scan=False),
    "nnx": lambda: Llama.tiny(),
}
SMALL = {"persistence_threshold": 300, "quantize_threshold": 300}


def batch(rows=16):
    return {"tokens": np.random.default_rng(0).integers(0, 60, (rows, 17)).astype(np.int32)}


def make_step(mesh, offload, model="scanned", preset="zero3", optimizer=None, **options):
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
