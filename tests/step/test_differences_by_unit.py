"""Differences to kept copies travel unit by unit, like every other gather of the unit.

In a step of one micro-batch the hop over `node` of one unit can then run beside the computation of
another. The copies and the weights have the bits that they have if all differences are sent before
the first unit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from tools.quick import quick_compilation  # noqa: F401
from tools.zoo.base import leaves, mse

import zeroxla
from zeroxla import Offload, WireFormat, ZeroConfig
from zeroxla.inspect import comms
from zeroxla.models import GPT
from zeroxla.models.losses import next_token_loss
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of
from zeroxla.step.gradients import Differentiator
from zeroxla.wire import encodings

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALL = {"persistence_threshold": 0, "quantize_threshold": 256}
STOCHASTIC = WireFormat(bits=4, block=64, rounding="stochastic")
UNROLLED = GPT.tiny(scan=False, layers=2)
REMAT = GPT.tiny(scan=False, layers=2, remat=True)
SCANNED = GPT.tiny(scan=True, tie=False)
ADAPTED = zeroxla.lora(UNROLLED, targets="attn/.*kernel", rank=8)


def tied_loss(params, batch, key):
    """The least model whose table is used by its first and its last unit."""
    x = params["table"][batch["tokens"][:, :-1]]
    for name in ("first", "second"):
        x = jnp.tanh(x @ params[name])
    return next_token_loss(x @ params["table"].T, batch)[0]


TIED = leaves(table=(64, 16), first=(16, 16), second=(16, 16)), tied_loss


def tokens(seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (16, 17), dtype=np.int32)}


def three_steps(model, config):
    """Return the state after three steps, and the report on what travels in one."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(model, mesh, optax.adam(1e-2), config=config)
    state = step.init(jax.random.key(0), tokens())
    sent = comms(step.lower(state, tokens()), mesh)
    for seed in range(3):
        state, _ = step(state, tokens(seed))
    return state, sent


def all_before_the_first_unit(monkeypatch):
    monkeypatch.setattr(Differentiator, "_later", lambda *_: frozenset())


# The differences that a step sends unit by unit, and those that it sends before the first unit.
# The table of a tied head is used by two units; its copy is sent once.
ROWS = {
    "tied": (TIED, {"unit_elements": 256}, (3, 0)),
    "tied, accumulated": (TIED, {"unit_elements": 256, "accumulate": 2}, (0, 3)),
    "unrolled": (UNROLLED, {}, (8, 0)),
    "a table in two units": (UNROLLED, {"unquantized": ()}, (10, 0)),
    "stochastic": (UNROLLED, {"weight_differences": STOCHASTIC}, (8, 0)),
    "gathered ahead": (UNROLLED, {"prefetch_bucket": 10**6}, (8, 0)),
    "kept whole": (UNROLLED, {"max_live_parameters": 10**6, "max_reuse_distance": 10**6}, (8, 0)),
    "16 bit": (UNROLLED, {"compute_dtype": "bfloat16"}, (8, 0)),
    "frozen": (UNROLLED, {"frozen": ("c_fc",)}, (8, 0)),
    "adapters": (ADAPTED, {}, (16, 0)),
    "parameters on the host": (UNROLLED, {"offload": Offload(params="host")}, (8, 0)),
    "remat": (REMAT, {"unit_elements": 3000}, (0, 8)),
    "scanned": (SCANNED, {}, (1, 4)),
    "accumulated": (UNROLLED, {"accumulate": 2}, (0, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_weights_and_copies_have_the_bits_of_a_refresh_before_the_first_unit(name, monkeypatch):
    model, options, counts = ROWS[name]
    config = ZeroConfig.zeropp_min(**{**ALL, **options})
    plans = []
    later = Differentiator._later

    def recorded(self, traced):
        found = later(self, traced)
        copied = {i for i, leaf in enumerate(self.layout) if leaf.quantized}
        plans.append((len(copied & found), len(copied - found)))
        return found

    monkeypatch.setattr(Differentiator, "_later", recorded)
    found, sent = three_steps(model, config)
    assert set(plans) == {counts}
    all_before_the_first_unit(monkeypatch)
    expected, before = three_steps(model, config)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, found.wire_state, expected.wire_state)
    assert sent.cross_host_bytes() == before.cross_host_bytes() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("tied, accumulated", (10, 6)),
        ("unrolled", (24, 16)),
        ("remat", (32, 16)),
        ("scanned", (15, 10)),
        ("accumulated", (24, 16)),
    ],
)
def test_backward_gathers_what_a_copy_was_quantized_to_in_forward(name, counts, monkeypatch):
    """With `secondary="wire"` a leaf is quantized twice in a step: its difference and its copy. The
    state has the bits that it has if backward quantizes the copy again."""
    model, options, _ = ROWS[name]
    found = []
    for form in ("compute", "wire"):
        quantized = []

        def counted(*args, quantized=quantized, quantize=encodings.quantize, **options):
            quantized.append(args)
            return quantize(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(encodings, "quantize", counted)
            config = ZeroConfig.zeropp_min(**{**ALL, **options, "secondary": form})
            state, _ = three_steps(model, config)
        found.append((state, len(quantized)))
    (expected, first), (state, second) = found
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, state.wire_state, expected.wire_state)
    assert (first, second) == counts


def matmuls_before_each_hop(config, layers=4, width=64):
    """Return for each hop over `node` of a wire how many products of matrices it follows from."""

    def loss(params, batch, key):
        x = batch["x"]
        for i in range(layers):
            x = jnp.tanh(x @ params[f"w{i}"])
        return mse(x, batch["y"])

    model = leaves(**{f"w{i}": (width, width) for i in range(layers)}), loss
    mesh = AbstractMesh((2, 4), ("node", "device"))
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)
    row = jax.ShapeDtypeStruct((16, width), jnp.float32)
    batch = {"x": row, "y": row}
    program, _ = trace(
        step.programs.train, step.abstract_state(batch), batch, opened=compat.forward_jaxpr
    )
    follows, found = {}, []
    for eq in local_of(program).equations:
        before = set().union(*(follows.get(v, ()) for v in eq.values))
        is_wire = eq.values and eq.values[0].aval.dtype == jnp.uint8
        if eq.name == "all_gather" and is_wire and "node" in eq.params["axis_name"]:
            found.append(len(before))
        if eq.name == "dot_general":
            before.add(eq)
        follows.update((v, before) for v in eq.outputs)
    return found


@pytest.mark.parametrize("ahead", [0, 64 * 64])
@pytest.mark.parametrize("preset", ["zeropp", "zeropp_min"])
def test_a_difference_is_sent_no_earlier_than_its_unit_may_be_gathered(preset, ahead):
    """A unit's hop waits for the unit before it or, one unit ahead, for the one before that."""
    config = getattr(ZeroConfig, preset)(
        **ALL, unit_elements=64 * 64, unquantized=(), prefetch_bucket=ahead
    )
    expected = [0, 0, 1, 2] if ahead else [0, 1, 2, 3]
    assert matmuls_before_each_hop(config) == expected
    # With two micro-batches the differences are sent before the first, here in one wire.
    if preset == "zeropp_min":
        assert matmuls_before_each_hop(dataclasses.replace(config, accumulate=2)) == [0]
