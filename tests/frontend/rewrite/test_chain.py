"""Norms and activation functions keep their inputs for backward."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import Both

WIDTH = 32
ONLY = {"attention": False, "loss": False}


def layer_norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6) * scale


def rms_norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


NORMS = {"layer norm": layer_norm, "RMS norm": rms_norm}
ACTIVATIONS = {
    "gelu": nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": nn.silu,
    "silu by hand": lambda x: x / (1 + jnp.exp(-x)),
    "relu": nn.relu,
}


def loss_of(norm, activation, layers=3):
    def loss(params, state, batch, key):
        def layer(x, leaves):
            y = activation(norm(x, leaves["scale"]) @ leaves["up"])
            return x + y @ leaves["down"], None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean(x**2), {}, state

    return loss


def inputs(rows=2, length=24, layers=3):
    draw = np.random.default_rng(0)
    params = {
        "scale": np.ones((layers, WIDTH), np.float32),
        "up": draw.standard_normal((layers, WIDTH, 4 * WIDTH), np.float32) * 0.1,
        "down": draw.standard_normal((layers, 4 * WIDTH, WIDTH), np.float32) * 0.1,
    }
    return params, {"x": draw.standard_normal((rows, length, WIDTH), np.float32)}


@pytest.mark.parametrize(
    "activation", thinned(["gelu"], slow=["exact gelu", "silu", "silu by hand", "relu"])
)
@pytest.mark.usefixtures("quick_compilation")
def test_chains_are_found_and_compute_the_same(activation):
    """The loss has the same bits; gradients are added up in another order."""
    norm = {"gelu": "layer norm"}.get(activation, "RMS norm")
    both = Both(loss_of(NORMS[norm], ACTIVATIONS[activation]), **ONLY)
    params, batch = inputs()
    (loss, _), (other_loss, _) = both.gradients(params, batch)
    assert loss == other_loss
    assert both.error(params, batch) < 1e-6
    kinds = [(x.kind, x.times, x.becomes) for x in both.rewritten.newest.findings]
    wanted = [("norm", 3, "its inputs are kept")]
    if activation != "relu":  # which keeps no more than its input anyway
        wanted.append(("activation", 3, "its inputs are kept"))
    assert kinds == wanted


def test_less_is_kept_for_backward():
    both = Both(loss_of(layer_norm, nn.gelu), **ONLY)
    params, batch = inputs(rows=4, length=512)
    written, rewritten = both.temporaries(params, batch)
    assert rewritten < 0.75 * written


def test_softmax_and_sums_are_no_norms():
    def loss(params, state, batch, key):
        probs = jax.nn.softmax(batch["x"] @ params["up"][0])
        y = (batch["x"] - 1) * 2 + batch["x"].sum()
        return (probs**2).mean() + (y @ params["up"][0]).mean(), {}, state

    assert Both(loss, **ONLY).findings(*inputs()) == ()
