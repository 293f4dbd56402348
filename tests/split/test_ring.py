"""Attention around a ring: what it computes, how the work is shared, and when a search takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import Llama
from zeroxla.models.attention import dense_attention
from zeroxla.models.blockwise import Dropout, blockwise_attention
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split import ring_blocks
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.conversions import conversions_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.known_attention import ring_way
from zeroxla.split.ring import ring_attention
from zeroxla.split.ring_blocks import Blocks
from zeroxla.step.axes import axes_split
from zeroxla.step.axes.split_loss import SplitLoss

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, HEADS, SHARED, WIDTH = 2, 2, 2, 4


def operands(length, masked):
    draw = np.random.default_rng(length)
    q, d_out = draw.normal(size=(2, ROWS, length, HEADS, SHARED, WIDTH)).astype(np.float32)
    k, v = draw.normal(size=(2, ROWS, length, HEADS, WIDTH)).astype(np.float32)
    mask = (draw.random((ROWS, length)) > 0.2).astype(np.int32)
    mask[:, 0] = 1  # Every query sees a key.
    return (q, k, v, mask if masked else None), d_out


def over(devices, call):
    """Return `call` on arrays whose positions are split over so many devices."""
    mesh, spec = Mesh(np.array(jax.devices()[:devices]), ("context",)), P(None, "context")
    return jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        compiler_options={"xla_backend_optimization_level": 0},
    )


@pytest.mark.parametrize(
    ("devices", "masked"), thinned([(3, True)], slow=[(2, False), (4, True)], rows=True)
)
def test_it_is_attention_and_so_is_its_derivative(devices, masked, monkeypatch):
    monkeypatch.setattr(ring_blocks, "LARGEST_BLOCK", 3)  # A half has two blocks.
    (q, k, v, mask), d_out = operands(12 * devices, masked)

    def differentiated(q, k, v, d_out, mask=None):
        run = functools.partial(ring_attention, "context", devices, mask_BL=mask)
        out, pullback = jax.vjp(lambda q, k, v: run(q, k, v), q, k, v)
        return out, pullback(d_out)

    args = (q, k, v, d_out) if mask is None else (q, k, v, d_out, mask)
    found = over(devices, differentiated)(*args)
    out, pullback = jax.vjp(lambda q, k, v: dense_attention(q, k, v, mask, 0, None), q, k, v)
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves((out, pullback(d_out)))):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_device_computes_the_same_number_of_blocks_and_none_for_nothing(devices):
    """All pairs of blocks that a causal mask leaves, each once, and the same number for each."""
    blocks = Blocks(half=2 * ring_blocks.LARGEST_BLOCK)
    per_half, seen = 2, []
    for device in range(devices):
        number = [
            half * per_half + i for half in (device, 2 * devices - 1 - device) for i in range(2)
        ]
        own = []
        for turn in range(devices):
            other = (device - turn) % devices
            keys = [h * per_half + i for h in (other, 2 * devices - 1 - other) for i in range(2)]
            pairs = blocks.visiting(are_earlier=device >= turn) if turn else blocks.own
            own += [(number[i], keys[j]) for i, j in pairs]
        seen.append(own)
    assert len({len(own) for own in seen}) == 1
    total = 2 * devices * per_half
    everything = [pair for own in seen for pair in own]
    assert sorted(everything) == [(i, j) for i in range(total) for j in range(i + 1)]


def collectives(devices, length):
    """Return the bytes that a device receives by `collective-permute` forward and backward."""
    (q, k, v, _), _ = operands(length, False)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(ring_attention("context", devices, q, k, v, None)))

    traced = over(devices, jax.grad(loss, (0, 1, 2))).trace(q, k, v)
    found = 0

    def visit(jaxpr):
        nonlocal found
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "ppermute":
                found += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
            for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=compat.is_jaxpr):
                if compat.is_jaxpr(param):
                    visit(compat.open_jaxpr(param)[0])

    visit(traced.jaxpr.jaxpr)
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_the_way_says_what_it_receives(devices):
    """No array of the whole sequence travels; the bytes are those of the traced program."""
    length = 8 * devices
    (way,) = (w for w in ways(length, devices) if w is not None)
    assert way.exchange is not None
    first_places = 4 * 2 * 2 * (devices - 1)  # two int32 travel with the keys, forward and backward
    said = way.exchange.forward + way.exchange.backward
    assert collectives(devices, length) == said + first_places


def ways(length, devices, start=0, dropout=None, keys=None):
    (q, k, v, _), _ = operands(length, False)

    def attend(q, k, v):
        return blockwise_attention(q, k, v, None, start, dropout, 4)

    program, _ = trace(attend, q, k[:, :keys], v[:, :keys])
    flow = DimsFlow.of(program, [], compat.inlined_jaxpr)
    custom = [eq for eq in flow.program.equations if eq in flow.rules]
    return [ring_way(eq, flow, devices, AxisCosts()) for eq in custom]


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 3},  # 16 positions are not 6 halves
        {"start": 4},
        {"dropout": Dropout(0.1, jax.random.key(0))},
        {"keys": 8},
    ],
    ids=["odd", "with a cache", "dropout", "fewer keys"],
)
def test_other_attention_is_not_taken_for_it(options):
    assert ways(16, **{"devices": 2, **options}) == [None]
    assert ways(16, 2) != [None]


@jax.custom_vjp
def blockwise_causal_attention(q, k, v, start):
    """Another function of the same name, with operands of the same shapes."""
    del k, v, start
    return q


blockwise_causal_attention.defvjp(
    lambda q, k, v, start: (q, (k, v)), lambda kept, ct: (ct, *map(jnp.zeros_like, kept), None)
)


def test_another_function_of_this_name_is_not_taken_for_it():
    (q, k, v, _), _ = operands(16, False)
    program, _ = trace(lambda q, k, v: blockwise_causal_attention(q, k, v, 0), q, k, v)
    flow = DimsFlow.of(program, [], compat.inlined_jaxpr)
    (eq,) = flow.rules
    assert ring_way(eq, flow, 2, AxisCosts()) is None


CHEAP = AxisCosts(latency=0.0, link=1e-18)
"""Costs with which a tiny model is worth splitting."""


def plan_of(model, batch, devices):
    """Return a split loss over `context`, the shapes of its arguments, and the adapted model."""
    adapted = adapt(model)
    key = jax.random.key(0)
    params, state = jax.eval_shape(adapted.init, key, batch)
    found = []

    def search():
        loss = functools.partial(adapted.loss, train=True)
        found.append(
            SplitLoss.of(
                loss,
                [("context", devices)],
                params,
                state,
                batch,
                key,
                costs={"context": AxisCosts()},
            )
        )
        return jnp.zeros(())

    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    jax.eval_shape(jax.shard_map(search, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))
    return found[0]


@pytest.mark.parametrize(
    ("kv_heads", "expected"), thinned([(2, "ring")], slow=[(4, "all-to-all")], rows=True)
)
def test_a_search_takes_it_where_heads_do_not_divide(kv_heads, expected):
    model = Llama.tiny(heads=3 * kv_heads, kv_heads=kv_heads, width=96 * kv_heads)
    batch = {"tokens": jax.ShapeDtypeStruct((1, 4097), jnp.int32)}
    plan = plan_of(model, batch, 4).plans[0]
    blocks = {c.forward for c in conversions_of(plan, 4) if c.times == 2} - {None}
    assert blocks == {expected}


@pytest.mark.slow
def test_a_step_around_a_ring_is_that_of_one_device(monkeypatch):
    monkeypatch.setattr(axes_split, "costs_on", lambda mesh, axis: CHEAP)
    model = Llama.tiny(layers=1, heads=3, kv_heads=1, width=24, attention_block=4)
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (4, 17), np.int32)}
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    mesh = zeroxla.make_mesh(nodes=1, context=4)
    step = zeroxla.make_step(model, mesh, config=config)
    state = step.init(jax.random.key(0), batch)
    loss, gradients = step.grad(state, batch)
    assert "ring" in str(step.describe())
    whole = jax.tree.map(jnp.asarray, zeroxla.full_params(state))
    want, expected = jax.jit(
        jax.value_and_grad(
            lambda p: adapt(model).loss(p, {}, batch, jax.random.key(1), train=True)[0]
        )
    )(whole)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for have, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(have - right).max() <= 5e-6 * np.abs(right).max()
