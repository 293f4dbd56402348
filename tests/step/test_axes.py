"""Work on one row that is split over axes: steps equal those of one device.

Quick tests take small models. Slow ones take the models of `zeroxla.models` on many meshes, and
every case of the zoo on each axis. The zoo's sequences have odd lengths: `context` pads them.
"""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tools.equality import GRADIENT_TOLERANCE, STEPS_TOLERANCE, Row, Settings, measure
from tools.quick import quick_compilation  # noqa: F401
from tools.reference import relative_errors, worst
from tools.zoo import CASES

import zeroxla
from zeroxla import Feedback, WireFormat, ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.models import GPT, MLP, Llama, Mixtral
from zeroxla.program.paths import paths_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 16
MODELS = {
    "GPT": lambda: GPT.tiny(),
    "GPT, written out": lambda: GPT.tiny(scan=False),
    "GPT, in blocks": lambda: GPT.tiny(attention_block=4, loss_chunk=4),
    "GPT, computed again": lambda: GPT.tiny(remat=True),
    "Mixtral": lambda: Mixtral.tiny(),
    "Mixtral, ragged": lambda: Mixtral.tiny(routing="ragged"),
    "Mixtral, ragged and computed again": lambda: Mixtral.tiny(
        routing="ragged", remat=True, scan=False
    ),
    "Llama, grouped heads": lambda: Llama.tiny(heads=8, kv_heads=4, width=64),
    "Llama, computed again": lambda: Llama.tiny(heads=8, kv_heads=4, width=64, remat=True),
}
CHUNKED, EIGHT = "GPT, in blocks", {"context": 8}
"""A loss in 4 chunks of 4 positions, which 8 devices cannot share."""
ROWS = [
    ("Llama, computed again", {"nodes": 1, "tensor": 4, "context": 2}),
    ("Mixtral, ragged", {"nodes": 1, "expert": 4}),
    ("Mixtral, ragged", {"nodes": 1, "expert": 2, "context": 2}),
    ("Mixtral, ragged and computed again", {"nodes": 2, "expert": 4}),
    *(
        (name, {"nodes": nodes, **axes})
        for name in [*MODELS][:-1]
        for nodes, axes in (
            (1, {"tensor": 4}),
            (2, {"tensor": 2, "context": 2}),
            (1, {"context": 4}),
            (1, {"context": 8}),
            (2, {"context": 4}),
            (1, {"tensor": 2, "context": 4}),
            (2, {"tensor": 2}),
            (1, {"expert": 2}),
            (2, {"expert": 2, "tensor": 2}),
        )
        if not (name == CHUNKED and axes == EIGHT)
    ),
]


def tokens(rows, length=LENGTH):
    return {"tokens": np.random.default_rng(0).integers(0, 64, (rows, length + 1), np.int32)}


def step_of(model, mesh, **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    return zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), ROWS)
def test_gradients_equal_those_of_the_whole_model(name, axes):
    assert_gradients_equal(name, axes, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "length"),
    [
        ("GPT", {"nodes": 2, "context": 4}, 15),
        *(
            (name, axes, length)
            for name, length in (
                ("GPT, written out", 13),
                ("GPT, in blocks", 15),
                ("GPT, computed again", 17),
                ("Llama, grouped heads", 15),
                ("Mixtral", 15),
            )
            for axes in (
                {"nodes": 1, "context": 4},
                {"nodes": 2, "context": 2},
                {"nodes": 1, "tensor": 2, "context": 4},
                {"nodes": 1, "expert": 2, "context": 2},
            )
        ),
    ],
)
def test_a_sequence_has_any_length(name, axes, length):
    assert_gradients_equal(name, axes, length)


def assert_gradients_equal(name, axes, length):
    model, mesh = MODELS[name](), zeroxla.make_mesh(**axes)
    batch = tokens(2 * mesh.shape["node"] * mesh.shape["device"], length)
    step = step_of(model, mesh)
    state = step.init(jax.random.key(0), batch)
    loss, gradients = step.grad(state, batch)
    adapted = adapt(MODELS[name]())
    whole = jax.tree.map(np.asarray, zeroxla.full_params(state))
    want, expected = jax.jit(
        jax.value_and_grad(lambda p: adapted.loss(p, {}, batch, jax.random.key(1), train=True)[0])
    )(whole)
    assert abs(float(loss) / float(want) - 1) < 1e-6
    assert worst(relative_errors(gradients, expected))[1] <= GRADIENT_TOLERANCE
    assert abs(float(step.eval(state, batch)["loss"]) / float(want) - 1) < 1e-6


AXES = [(("tensor", 2),), (("expert", 2),), (("context", 2),)]
WITH_SEQUENCES = (
    *("gpt_unrolled", "gpt_unrolled_remat", "gpt_scan", "gpt_scan_remat", "gpt_masked"),
    *("llama_scan", "llama_scan_remat", "llama_unrolled", "odd_embedding", "tied_embedding"),
    *("custom_vjp", "inner_training", "spectral", "batchnorm", "encoder_decoder", "branches"),
)
NOTHING_TO_SPLIT = {
    "tensor": ("odd_embedding", "penalty_only", "nested_scans", "scanned_and_read_whole"),
    "expert": ("penalty_only", "spectral", "nested_scans"),
    "context": tuple(case for case in CASES if case not in WITH_SEQUENCES),
}
"""The cases whose sizes are odd, which read no leaf in a product with rows, or have no sequence."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "axes"), [*itertools.product(CASES, AXES)])
def test_every_model_of_the_zoo_trains_as_on_one_device(case, axes):
    row = Row(case=case, mesh=(2, 2), settings=Settings(), axes=axes)
    if case in NOTHING_TO_SPLIT[axes[0][0]]:
        with pytest.raises(ValueError, match="splits none of the model's products"):
            measure(row)
        return
    errors = measure(row)
    # The gradient of a bias before a norm is rounding alone.
    tolerance = 20 * GRADIENT_TOLERANCE if case == "batchnorm" else GRADIENT_TOLERANCE
    assert errors.loss <= GRADIENT_TOLERANCE
    assert errors.gradient[1] <= tolerance, errors.gradient
    assert errors.norm <= GRADIENT_TOLERANCE
    assert errors.metrics <= GRADIENT_TOLERANCE
    assert errors.params[1] <= STEPS_TOLERANCE, errors.params
    assert errors.model_state[1] <= STEPS_TOLERANCE, errors.model_state


@pytest.mark.slow
def test_a_device_stores_its_share_and_gathers_its_part():
    """Leaves are stored over all devices, whatever splits them; a device gathers a quarter."""
    mesh = zeroxla.make_mesh(nodes=1, tensor=4)
    step, batch = step_of(GPT.tiny(), mesh), tokens(4)
    state = step.init(jax.random.key(0), batch)
    kernel = state.params["h"]["mlp"]["c_fc"]["kernel"]
    assert kernel.shape == (2, 32, 128)
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    plan = step.programs.plan(
        step.programs.layout(state), state.model_state, batch, jax.random.key(0)
    )
    sizes = {v.aval.shape for v in plan.leaves}
    assert (2, 32, 32) in sizes  # a quarter of the hidden width
    assert (2, 32, 128) not in sizes


class Dropped(nn.Module):
    """Two products of matrices with a mask between them."""

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.Embed(64, 16)(batch["tokens"])
        x = nn.Dropout(0.2, deterministic=not train)(nn.tanh(nn.Dense(32)(x)))
        return jnp.mean(nn.Dense(8)(x) ** 2)


DROPPED = {"two products": Dropped, "GPT": lambda: GPT.tiny(dropout=0.2)}


@pytest.mark.parametrize(
    ("name", "axis"),
    [("two products", "tensor"), ("GPT", "tensor"), ("GPT", "context")],
)
@pytest.mark.slow
def test_dropout_draws_the_same_mask_as_without_axes(name, axis):
    batch = tokens(8)
    losses = []
    for axes in ({}, {axis: 2}):
        size = 4 * (2 if axes else 1)
        mesh = zeroxla.make_mesh(nodes=2, devices=jax.devices()[:size], **axes)
        step = step_of(DROPPED[name](), mesh)
        state = step.init(jax.random.key(0), batch)
        losses.append(float(step(state, batch)[1]["loss"]))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-6)


@pytest.mark.slow
def test_a_state_moves_to_other_axes_and_to_none():
    batch = tokens(8)
    first = step_of(GPT.tiny(), zeroxla.make_mesh(nodes=2, tensor=2))
    state = first.init(jax.random.key(0), batch)
    state, _ = first(state, batch)
    want = float(first.eval(state, batch)["loss"])
    for axes in ({"nodes": 1, "context": 4}, {"nodes": 4}):
        other = step_of(GPT.tiny(), zeroxla.make_mesh(**axes))
        other.abstract_state(batch)
        state = first.reshape(state, other)
        assert abs(float(other.eval(state, batch)["loss"]) / want - 1) < 1e-6
        first = other


def test_the_description_says_what_is_split_and_what_travels():
    """Megatron's conversions with sequence parallelism, where bytes count and not latencies."""
    length = 512
    model = GPT.tiny(
        length=length, width=512, heads=8, vocab=4096, attention_block=length, loss_chunk=0
    )
    step, batch = step_of(model, zeroxla.make_mesh(nodes=1, tensor=4)), tokens(4, length)
    step.abstract_state(batch)
    described = step.describe()
    rows = {row.path: row.placement for row in described.rows}
    assert rows["h/mlp/c_fc/kernel"] == "dim 1 over 8, tensor: dim 2 in 4"
    assert rows["h/ln_1/scale"] == "dim 1 over 8"
    (report,) = described.axes
    in_blocks = [c for c in report.conversions if c.times == 2]
    assert [(c.forward, c.backward) for c in in_blocks] == [
        ("all-gather", "reduce-scatter"),
        ("reduce-scatter", "all-gather"),
    ] * 2
    assert {c.shape for c in in_blocks} == {(2, length, 512)}
    # The vocabulary is split, and no logits are gathered.
    assert "tensor: dim 0 in 4" in rows["wte/embedding"]
    assert 4096 not in {c.shape[-1] for c in report.conversions if c.shape}
    text = str(described)
    assert "tensor=4: how devices hold arrays" in text
    assert "part of dim 1" in text


@pytest.mark.slow
def test_tokens_travel_to_their_experts_and_back():
    """Two all-to-alls a layer, and banks stored in parts; everything else is split by rows."""
    length = 256
    model = Mixtral.tiny(width=512, length=length, hidden=1024)
    step, batch = step_of(model, zeroxla.make_mesh(nodes=1, expert=4)), tokens(8, length)
    step.abstract_state(batch)
    described = step.describe()
    rows = {row.path: row.placement for row in described.rows}
    assert "expert: dim 1 in 4" in rows["layers/experts/gate_proj"]
    assert "expert" not in rows["layers/self_attn/q_proj/kernel"]
    in_layers = [c for c in described.axes[0].conversions if c.times == 2 and len(c.shape) == 4]
    assert [(c.forward, c.backward) for c in in_layers] == [("all-to-all", "all-to-all")] * 2


@pytest.mark.slow
def test_sorted_experts_are_a_quarter_of_the_work():
    """As XLA counts the compiled step; and the bank is stored and gathered in parts."""
    batch, counted = tokens(8), {}
    for size, axes in ((1, {}), (4, {"expert": 4})):
        mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:size], **axes)
        step = step_of(Mixtral.tiny(routing="ragged"), mesh)
        compiled = step.lower(step.abstract_state(batch), batch).compile()
        counted[size] = compiled.cost_analysis()["flops"]
    assert counted[4] < 1.1 * counted[1] / 4
    rows = {row.path: row.placement for row in step.describe().rows}
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert "expert: dim 1 in 4" in rows[f"layers/experts/{name}"]


@pytest.mark.slow
def test_attention_of_a_long_sequence_is_split_by_heads():
    """Ulysses: queries, keys and values to heads, and one all-to-all back."""
    length = 2048
    model = GPT.tiny(length=length, width=512, heads=8)
    step, batch = step_of(model, zeroxla.make_mesh(nodes=1, context=4)), tokens(2, length)
    step.abstract_state(batch)
    (report,) = step.describe().axes
    in_blocks = [c for c in report.conversions if c.times == 2]
    assert [(c.forward, c.backward) for c in in_blocks] == [("all-to-all", "all-to-all")] * 2
    assert [c.shape[-1] for c in in_blocks] == [3 * 512, 512]
    # The four chunks of the loss are dealt: nothing else travels but sums over the sequence.
    assert all(c.num_bytes <= 4 * 2 * length for c in report.conversions if c.times == 1)


@pytest.mark.slow
def test_wires_keep_copies_and_errors_of_parts():
    """A copy has the parts one after another; its name in a checkpoint says which."""
    options = {
        "weight_differences": WireFormat(bits=8, block=64),
        "hpz_size": "node",
        "error_feedback": Feedback(),
        "inter_node_reduce": "step",
        "gradient_wire": WireFormat(bits=8, block=64),
        "quantize_threshold": 0,
    }
    step = step_of(GPT.tiny(), zeroxla.make_mesh(nodes=2, tensor=2), **options)
    shapes = step.abstract_state(tokens(8))
    wires, paths = shapes.wire_state, [path for path, _ in paths_of(shapes.params)]
    names = wires.names(paths)
    at = paths.index(("h", "attn", "c_attn", "kernel"))
    copy, error = wires.copies[at], wires.errors[at]
    assert copy.shape == (2, 32, 96)
    assert copy.sharding.spec == PartitionSpec(None, "device", "tensor")
    assert error.shape[:3] == (2, 4, 2)  # nodes, devices of a node, nodes
    assert error.sharding.spec == PartitionSpec("node", ("device", "tensor"))
    parts = "tensor 2 dim 2 (3,4,8)"  # of queries, keys and values half of four heads of eight
    assert names.copies[at] == ("copies", *paths[at], parts)
    assert names.errors[at] == ("errors", *paths[at], parts)
    at = paths.index(("h", "mlp", "c_fc", "bias"))  # whole along `tensor`
    assert wires.copies[at].sharding.spec == PartitionSpec(None, ("tensor", "device"))
    assert names.copies[at] == ("copies", *paths[at])
    other = dataclasses.replace(wires, parts=())
    assert wires.fits(wires)
    assert not wires.fits(other)


@pytest.mark.slow
def test_copies_of_parts_are_the_weights():
    """After steps in which only 8-bit differences have crossed nodes."""
    batch, mesh = tokens(8), zeroxla.make_mesh(nodes=2, tensor=2)
    options = {"weight_differences": WireFormat(bits=8), "hpz_size": "node"}
    step = step_of(GPT.tiny(), mesh, quantize_threshold=0, **options)
    state = step.init(jax.random.key(0), batch)
    for _ in range(3):
        before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
        state, _ = step(state, batch)
    assert any(state.wire_state.parts)
    for x, copy in zip(before, state.wire_state.copies, strict=True):
        if copy is not None:  # the parts of some leaves lie in another order
            difference = np.sort(np.ravel(x)) - np.sort(np.ravel(np.asarray(copy)))
            assert np.abs(difference).max() < 0.01 * np.abs(x).max()


def test_the_exchange_of_shards_is_a_phase_and_gathers_in_a_node_are_one_hop():
    step, batch = step_of(GPT.tiny(), zeroxla.make_mesh(nodes=2, tensor=2)), tokens(8)
    report = zeroxla.inspect.comms(step.lower(step.abstract_state(batch), batch), step.mesh)
    assert {(row.axis, row.kind) for row in report.select(phase="deal")} == {
        ("tensor", "all-to-all")
    }
    assert report.total_bytes(axis="tensor", phase="forward") > 0
    assert report.total_bytes(axis="device+tensor", phase="gather") > 0
    assert report.flat(min_elements=64) == ()
    assert report.select(phase="other", min_elements=64) == ()


def test_devices_along_an_axis_round_with_other_random_numbers():
    mesh = zeroxla.make_mesh(nodes=2, tensor=2)
    config = ZeroConfig(weight_wire=WireFormat(bits=8, rounding="stochastic"))
    wiring = step_of(GPT.tiny(), mesh, weight_wire=config.weight_wire).programs.wiring

    def draw():
        return jax.random.bits(wiring.key(jax.random.key(0)), (1,))

    every = PartitionSpec(mesh.axis_names)
    drawn = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=(), out_specs=every))()
    assert len(np.unique(drawn)) == 8


def test_an_axis_that_can_split_no_product_is_refused_with_their_names():
    mesh = zeroxla.make_mesh(nodes=1, context=2)
    text = r"context=8 splits none .* that is read in chunks, the axis must divide their number or"
    with pytest.raises(ValueError, match=text):
        step_of(MODELS[CHUNKED](), zeroxla.make_mesh(nodes=1, **EIGHT)).abstract_state(tokens(2))
    images = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    with pytest.raises(ValueError, match=r"a dim of the sequence.*dot_general of float32\[2,784\]"):
        step_of(MLP.tiny(), mesh).abstract_state(images)
