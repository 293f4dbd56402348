"""A reference for generation that uses neither caches nor meshes: whole forward passes over whole
leaves."""

import dataclasses
import functools
import gc

import jax
import numpy as np
import optax

import zeroxla
from zeroxla import ZeroConfig

PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], [5, 5, 5, 5]]
KEY = jax.random.key(3)
WINDOW = 32


@dataclasses.dataclass(frozen=True)
class Trained:
    """A step, a state after some steps, and the model as one function of tokens."""

    step: zeroxla.Step
    state: zeroxla.TrainState
    logits: object

    def greedy(self, prompts, num_tokens):
        """Return the likeliest continuations, computed with a whole pass for each token."""
        rows = [list(prompt) for prompt in prompts]
        for _ in range(num_tokens):
            padded = np.zeros((len(rows), WINDOW), np.int32)
            for i, row in enumerate(rows):
                padded[i, : len(row)] = row
            logits = np.asarray(self.logits(padded))
            for i, row in enumerate(rows):
                row.append(int(logits[i, len(row) - 1].argmax()))
        return np.array([row[-num_tokens:] for row in rows])

    def logprobs(self, rows):
        """Return log-probabilities of right-padded rows' next tokens."""
        padded = np.zeros((len(rows), WINDOW), np.int32)
        padded[:, : rows.shape[1]] = rows
        logits = np.asarray(self.logits(padded), np.float64)[:, : rows.shape[1] - 1]
        logits -= logits.max(-1, keepdims=True)
        of_all = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(of_all, rows[:, 1:, None], 2)[..., 0]


def train(model, mesh, *, steps=3, **config):
    """Train a model for a few steps, so that rounding does not decide which tokens are
    likeliest."""
    config = ZeroConfig(**{"persistence_threshold": 0, **config})
    step = zeroxla.make_step(model, mesh, optax.adam(1e-2), config=config)
    batch = {"tokens": np.random.default_rng(0).integers(0, 24, (8, 17)).astype(np.int32)}
    state = step.init(jax.random.key(0), batch)
    for _ in range(steps):
        state, _ = step(state, batch)
    return reference(step, state)


def reference(step, state):
    """Return a trained step together with the whole model as one function."""
    adapted, params = step.adapted, zeroxla.full_params(state)
    apply = jax.jit(functools.partial(adapted.apply, params, state.model_state))
    return Trained(step, state, apply)


def live_bytes():
    """Return the bytes of all live arrays on the fullest device, each buffer once."""
    gc.collect()
    held = {}
    for array in jax.live_arrays():
        if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            for shard in array.addressable_shards:
                buffers = held.setdefault(shard.device, {})
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max(sum(buffers.values()) for buffers in held.values())


def padded(rows):
    """Return rows of different lengths as one array, padded on the right."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
