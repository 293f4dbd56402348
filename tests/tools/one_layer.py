"""One layer of attention whose scores and mixing a test writes by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tools.attention_styles import HEAD, HEADS, LENGTH, WIDTH

ONLY = {"attention_block": 16, "loss": False, "norms": False}


def projected(attend):
    """A loss of one layer whose attention is a function of queries, keys and values."""

    def loss(params, state, batch, key):
        x = batch["x"]
        q, k, v = ((x @ params[n]).reshape(*x.shape[:2], HEADS, HEAD) for n in "qkv")
        return jnp.mean(attend(q, k, v, batch, params) ** 2), {}, state

    return loss


def inputs(length=LENGTH):
    draw = np.random.default_rng(0)
    params = {n: draw.standard_normal((WIDTH, WIDTH), np.float32) * 0.3 for n in "qkv"}
    params["bias"] = draw.standard_normal((HEADS, length, length), np.float32)
    params["table"] = draw.standard_normal((8, HEADS), np.float32)
    params["factor"] = np.float32(0.3)
    batch = {"x": draw.standard_normal((2, length, WIDTH), np.float32)}
    return params, batch


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5


def mixed(probs, v):
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)
