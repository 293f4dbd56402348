"""Loops that make the last hop of a turn's gradients in the next one, as on GPUs: the same bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.zoo.base import leaves

import zeroxla
from zeroxla import WireFormat, ZeroConfig
from zeroxla.models import GPT
from zeroxla.models.losses import next_token_loss
from zeroxla.program.lagged_scan import run_with_lag
from zeroxla.program.scan import Scan
from zeroxla.program.trace import trace
from zeroxla.wire import resolve
from zeroxla.wire.collectives import Collectives

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALL = {"persistence_threshold": 0, "quantize_threshold": 500, "prefetch_bucket": 10**6}
STOCHASTIC = WireFormat(bits=4, block=64, rounding="stochastic")
CONFIGS = {
    "zeropp": ZeroConfig.zeropp(**ALL),
    "zeropp_min": ZeroConfig.zeropp_min(**ALL),
    "stochastic": ZeroConfig(gradient_wire=STOCHASTIC, **ALL),
    "floats in a node": ZeroConfig(inter_node_gradient_wire=WireFormat(bits=8, block=64), **ALL),
    "accumulated": ZeroConfig.zeropp(accumulate=2, **ALL),
}


def products(remat: bool, layers: int):
    """The least model with a loop over layers, as functions."""

    def loss(params, batch, key):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        x = params["table"][batch["tokens"][:, :-1]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return next_token_loss(x @ params["head"], batch)[0]

    return leaves(table=(64, 32), layers=(layers, 32, 32), head=(32, 64)), loss


def gpt(remat: bool, layers: int):
    return GPT.tiny(scan=True, remat=remat, layers=layers)


def gradients(config: ZeroConfig, *, make=gpt, remat: bool = False, layers: int = 3):
    model = make(remat, layers)
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(model, mesh, optax.adam(1e-2), config=config)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17), dtype=np.int32)
    state = step.init(jax.random.key(0), {"tokens": tokens})
    text = step.lower(state, {"tokens": tokens}).as_text()
    return jax.device_get(step.grad(state, {"tokens": tokens})), text.count("all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "remat", "layers"),
    [
        ("stochastic", products, True, 3),
        ("stochastic", gpt, True, 3),
        ("zeropp", gpt, False, 3),
        ("zeropp_min", gpt, False, 3),
        ("floats in a node", gpt, False, 2),
        ("accumulated", gpt, True, 2),
    ],
)
def test_gradients_have_the_same_bits(name, make, remat, layers, monkeypatch):
    expected, exchanges = gradients(CONFIGS[name], make=make, remat=remat, layers=layers)
    across = functools.partial(Collectives, exchanges_across_turns=True)
    monkeypatch.setattr(
        resolve, "Collectives", lambda **given: across(**{**given, "exchanges_across_turns": True})
    )
    found, more = gradients(CONFIGS[name], make=make, remat=remat, layers=layers)
    assert more > exchanges, "the loop's first turn stands before it, with exchanges of its own"
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [2, 5])
def test_each_rest_is_finished_once_in_its_own_place(length, reverse, back):
    def function(x):
        return jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(()), x, reverse=reverse)

    xs = jnp.arange(1.0, length + 1)
    program, _ = trace(function, xs)
    scan = Scan(next(eq for eq in program.equations if eq.name == "scan"))
    total, before, squares = run_with_lag(
        scan,
        lambda carry, x: (carry + x, {"before": carry}, (x, 2 * x)),
        lambda rest: rest[0] * rest[1],
        jnp.zeros(()),
        xs,
        back=back,
    )
    order = range(length)[:: -1 if reverse != back else 1]
    expected = np.zeros(length)
    for i, at in enumerate(order):
        expected[at] = sum(xs[j] for j in order[:i])
    assert total == xs.sum()
    np.testing.assert_array_equal(before["before"], expected)
    np.testing.assert_array_equal(squares, 2 * xs**2)
