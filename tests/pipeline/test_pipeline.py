"""Pipelines: what models and layers may be, how they are cut, and where leaves are stored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools import cut_models
from tools.checkpoints import assert_same, logical
from tools.pipeline_equality import KEY, alexnet, images, listed, tokens
from tools.pipelines import FAST, MODELS, step_of
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Checkpointer, Pipeline, Profile
from zeroxla.models import GPT, AlexNet

pytestmark = pytest.mark.usefixtures("quick_compilation")

RTOL = 5e-6


def assert_equals_the_whole(step, pipeline, batch, *, rtol=RTOL):
    """Loss, metrics of evaluation and gradients, each leaf within `rtol` of its largest element."""
    state = step.init(KEY, batch)
    params = jax.tree.map(jnp.asarray, zeroxla.full_params(state))

    def whole(params):
        return pipeline.adapted.loss(params, {}, batch, KEY, train=True)[0]

    loss, grads = jax.jit(jax.value_and_grad(whole))(params)
    found, mine = step.grad(state, batch)
    np.testing.assert_allclose(found, loss, rtol=rtol)
    np.testing.assert_allclose(step.eval(state, batch)["loss"], loss, rtol=rtol)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * max(np.abs(b).max(), 1e-6))


@pytest.mark.parametrize(
    ("model", "mesh", "m", "options", "weights"),
    [
        pytest.param(
            *("listed, remat", (4, 1, 2), 8, {"memory": "low"}, "step"),
            marks=[pytest.mark.smoke, pytest.mark.slow],
        ),
        pytest.param(*("gpt, remat, untied", (4, 1, 2), 3, {}, "tick"), marks=pytest.mark.slow),
        pytest.param(
            *("gpt, remat, untied", (2, 2, 1), 2, {"schedule": "zb-h1"}, "step"),
            marks=[pytest.mark.smoke, pytest.mark.slow],
        ),
    ],
)
def test_a_step_equals_the_whole_model(model, mesh, m, options, weights):
    pipeline = MODELS[model](**options)
    step = step_of(pipeline, *mesh, m, weights=weights)
    assert_equals_the_whole(step, pipeline, tokens(m * mesh[1] * mesh[2]))


@pytest.mark.slow
def test_floating_inputs_are_cast_to_the_compute_dtype():
    """A convolution refuses operands of two dtypes, and in float32 the loss would be another."""

    def loss(y, x):
        return jnp.mean((y - x[..., :1]).astype(jnp.float32) ** 2)

    pipeline = Pipeline([nn.Conv(4, (3,)), nn.tanh, nn.Dense(1)], loss)
    batch = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
    losses = []
    for pipe in (1, 2):
        step = step_of(pipeline, pipe, 1, 1, 2, compute_dtype="bfloat16")
        state = step.init(KEY, batch)
        evaluated = step.eval(state, batch)["loss"]
        losses.append((step(state, batch)[1]["loss"], evaluated))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_alexnet_of_two_stages_with_its_own_names():
    model, pipeline = AlexNet.tiny(dropout=0.0), alexnet()
    step, batch = step_of(pipeline, 2, 1, 1, 2), images(4)
    assert_equals_the_whole(step, pipeline, batch)
    assert step.describe().boundaries == (0, 19, 22)
    whole = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1, devices_per_node=2))
    names = [jax.tree.structure(s.abstract_state(batch).params) for s in (whole, step)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_dropout_differs_by_micro_batch_and_repeats():
    pipeline = Pipeline.from_model(GPT.tiny(layers=4, dropout=0.2))
    step, batch = step_of(pipeline, 2, 1, 1, 3), tokens(6)
    state = step.init(KEY, batch)
    params = jax.tree.map(jnp.asarray, zeroxla.full_params(state))
    key = jax.random.fold_in(state.key, 0)

    def loss(params):
        losses = []
        for i in range(3):
            rows = {"tokens": batch["tokens"][2 * i : 2 * i + 2]}
            mine = jax.random.fold_in(jax.random.fold_in(key, i), 0)
            losses.append(pipeline.adapted.loss(params, {}, rows, mine, train=True)[0])
        return sum(losses) / 3

    want, grads = jax.jit(jax.value_and_grad(loss))(params)
    found, mine = step.grad(state, batch)
    np.testing.assert_allclose(found, want, rtol=RTOL)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=RTOL * np.abs(b).max())


@pytest.mark.slow
def test_checkpoints_open_across_numbers_of_stages(tmp_path):
    """(pipe 4) -> (pipe 2, device 2) -> no pipe: same names, same leaves, the next losses."""
    model = GPT.tiny(layers=4)
    four, two = (
        step_of(Pipeline.from_model(model), pipe, 1, devices, 2)
        for pipe, devices in ((4, 1), (2, 2))
    )
    whole = zeroxla.make_step(
        model, zeroxla.make_mesh(nodes=1, devices_per_node=4), optax.adam(1e-2), microbatches=1
    )
    batch = tokens(8)
    state = four.init(KEY, batch)
    for _ in range(2):
        state, _ = four(state, batch)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        kept, losses = logical(state), []
        for _ in range(3):
            state, metrics = four(state, batch)
            losses.append(float(metrics["loss"]))
        for step in (two, whole):
            step.abstract_state(batch)
            again = checkpointer.restore(step, 2).state
            assert_same(logical(again), kept)
            for loss in losses:
                again, metrics = step(again, batch)
                assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-5)


# where to cut


@pytest.mark.parametrize("boundaries", thinned([None], slow=[[0, 0, 8, 8]]))
def test_stages_without_layers_pass_on_what_they_get(boundaries):
    """Three stages for two layers, where the last layer stays with the loss; and the first and the
    last stage empty."""
    if boundaries is None:
        layers = [nn.Dense(5), nn.Dense(3)]
        pipeline = Pipeline(layers, lambda y, b: jnp.mean(y**2), allow_empty=True)
        batch = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    else:
        pipeline, batch = listed(partition=boundaries, allow_empty=True), tokens(4)
    step = step_of(pipeline, 3, 1, 1, 2)
    assert_equals_the_whole(step, pipeline, batch)
    assert step.describe().boundaries == tuple(boundaries or (0, 1, 1, 2))


@pytest.mark.parametrize("how", ["profile", Profile(measure=True), Profile(machine=FAST)], ids=str)
def test_a_profile_balances_what_layers_cost(how):
    """Width 300 costs what it costs, however few parameters a layer has; equal blocks cost the
    same."""
    wide = [lambda x: jnp.tanh(x) @ jnp.ones((300, 300))] * 3
    layers = [nn.Dense(300), *wide, nn.Dense(1)]
    pipeline = Pipeline(layers, lambda y, b: jnp.mean(y**2), partition=how)
    step, batch = step_of(pipeline, 2, 1, 1, 2), np.ones((256, 2), np.float32)
    step.abstract_state(batch)
    found = step.describe()
    assert found.unit == "time"
    assert found.costs[1] == found.costs[2] == found.costs[3] > 2 * found.costs[4] > 0
    assert found.boundaries in ((0, 2, 5), (0, 3, 5))
    by_parameters = step_of(
        Pipeline(layers, lambda y, b: jnp.mean(y**2), partition="parameters"), 2, 1, 1, 2
    )
    by_parameters.abstract_state(batch)
    assert by_parameters.describe().boundaries == (0, 4, 5)
    assert step.describe() == found  # measured once


@pytest.mark.slow
def test_a_profile_of_blocks_in_a_loop():
    pipeline = Pipeline.from_model(GPT.tiny(layers=4), partition=Profile(machine=FAST))
    step = step_of(pipeline, 2, 1, 2, 2)
    step.abstract_state(tokens(8))
    found = step.describe()
    wte, wpe, *blocks, last = found.costs
    assert len(set(blocks)) == 1
    assert blocks[0] > last > wte > wpe
    flops = [layer.flops for layer in found.layers]
    # Forward and backward of a block: 6 FLOPs for each parameter and token, and attention.
    block = 6 * 12_704 * 2 * 12
    assert block < flops[2] < 1.3 * block


# where leaves are stored


class Scaled(nn.Module):
    """A block with a parameter of one element."""

    @nn.compact
    def __call__(self, x, _):
        return x + self.param("scale", nn.initializers.ones, ()) * jnp.tanh(nn.Dense(16)(x)), None


class ScaledBlocks(nn.Module):
    """Four of them in a loop."""

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            Scaled,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=4,
        )
        return nn.Dense(1)(loop(name="h")(nn.Dense(16)(x), None)[0])

    def loss(self, batch, *, train):
        return jnp.mean((self(batch) - 1) ** 2), {}


@pytest.mark.slow
def test_a_leaf_of_blocks_that_is_too_small_to_be_split_stays_whole():
    pipeline, batch = Pipeline.from_model(ScaledBlocks()), np.eye(16, 8, dtype=np.float32)
    step = step_of(pipeline, 2, 1, 2, 2)
    assert_equals_the_whole(step, pipeline, batch)
    params = step.abstract_state(batch).params["h"]
    assert params["scale"].sharding.spec == jax.sharding.PartitionSpec()
    assert params["Dense_0"]["bias"].sharding.spec[0] == "pipe"


def of_blocks(step, batch):
    """How the leaves of the blocks are split, and the bytes that leaves move to their stages."""
    state = step.abstract_state(batch)
    specs = {x.sharding.spec for x in jax.tree.leaves(state.params["h"])}
    report = zeroxla.inspect.comms(step.lower(state, batch), step.mesh)
    return specs, report.total_bytes(phase="move")


@pytest.mark.slow
def test_blocks_are_stored_on_their_stage_where_all_have_as_many():
    model, batch = GPT.tiny(layers=4), tokens(8)
    even = step_of(Pipeline.from_model(model), 2, 1, 2, 2)
    specs, moved = of_blocks(even, batch)
    assert even.describe().boundaries == (0, 4, 7)
    assert specs == {jax.sharding.PartitionSpec("pipe", ("device", "node"))}
    # The embeddings and the last norm, half of which a device has of its share, there and back.
    wte, wpe, ln_f = 64 * 32, 32 * 32, 2 * 32
    longest = max(wte + wpe, wte + ln_f)  # of the two stages, whose parts have the same length
    assert moved == 2 * 4 * longest / 2 / 2
    moments = even.abstract_state(batch).opt_state[0].mu["h"]
    assert {x.sharding.spec for x in jax.tree.leaves(moments)} == specs

    uneven = step_of(Pipeline.from_model(model, partition=[0, 3, 7]), 2, 1, 2, 2)
    specs, moved = of_blocks(uneven, batch)
    assert specs == {jax.sharding.PartitionSpec(None, ("device", "node", "pipe"))}
    assert moved > 2 * 4 * 3 * 12_704 / 2 / 2  # of the stage with three blocks


def test_a_state_that_is_stored_for_other_stages_is_refused():
    """A checkpoint would open."""
    model, batch = ScaledBlocks(), np.eye(8, 8, dtype=np.float32)
    even, uneven = (
        step_of(Pipeline.from_model(model, partition=cut), 2, 1, 1, 2)
        for cut in ([0, 3, 6], [0, 2, 6])
    )
    state = even.init(KEY, batch)
    specs = {x.sharding.spec[0] for x in jax.tree.leaves(state.params["h"]["Dense_0"])}
    assert specs == {"pipe"}
    with pytest.raises(ValueError, match="is stored by stage, the same number of layers on each"):
        uneven.grad(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_a_live_state_moves_between_numbers_of_stages(scan):
    """4 stages, 2, none, and 4 again: the same leaves, bit for bit, and the next losses."""
    model, batch = GPT.tiny(layers=4, scan=scan), tokens(8)
    four, two, whole = (
        step_of(Pipeline.from_model(model), pipe, 1, devices, 2)
        for pipe, devices in ((4, 1), (2, 2), (1, 4))
    )
    state = four.init(KEY, batch)
    state, _ = four(state, batch)
    kept = logical(state)
    expected, step, losses = four(jax.tree.map(jnp.copy, state), batch)[1], four, []
    for other in (two, whole, four):
        other.abstract_state(batch)
        state, step = step.reshape(state, other), other
        assert_same(logical(state), kept)
        losses.append(step(jax.tree.map(jnp.copy, state), batch)[1]["loss"])
    if not scan:
        offload = zeroxla.Offload(params="host", optimizer="host")
        host = step_of(Pipeline.from_model(model), 2, 1, 2, 2, offload=offload)
        host.abstract_state(batch)
        state = four.reshape(state, host)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"pinned_host"}
        assert_same(logical(state), kept)
        state = host.reshape(state, four)
        losses.append(four(jax.tree.map(jnp.copy, state), batch)[1]["loss"])
    np.testing.assert_allclose(losses, expected["loss"], rtol=2e-5)
    assert losses[-1] == expected["loss"]

    other = step_of(Pipeline.from_model(GPT.tiny(layers=3)), 2, 1, 2, 2)
    other.abstract_state(batch)
    with pytest.raises(ValueError, match="parameters of the state and of the other step differ"):
        step.reshape(state, other)


@pytest.mark.parametrize(
    ("name", "pipe", "schedule"),
    thinned(
        [],
        slow=[
            ("scanned, reverse, all read", 2, "1f1b"),
            ("scanned, reverse, all read", 4, "zb-h1"),
            ("all states", 4, "1f1b"),
            ("unet", 4, "gpipe"),
            ("encoder-decoder", 2, "1f1b"),
            ("encoder-decoder", 4, "zb-h1"),
            ("unrolled, remat", 4, "1f1b"),
        ],
        rows=True,
    ),
)
def test_models_that_nobody_wrote_for_stages(name, pipe, schedule):
    make, batch_of = cut_models.MODELS[name]
    pipeline = Pipeline.from_model(make(), schedule=schedule)
    step = step_of(pipeline, pipe, 1, 2, 3)
    assert_equals_the_whole(step, pipeline, batch_of(12), rtol=2e-5)


def test_a_description_says_what_a_stage_holds_and_who_updates():
    """Of two stages of two devices: whole leaves in a step, half of their own shards at rest."""
    batch = tokens(8)
    step = step_of(Pipeline.from_model(GPT.tiny(layers=4)), 2, 1, 2, 2)
    with pytest.raises(ValueError, match="nothing to describe yet"):
        step.describe()
    step.abstract_state(batch)
    found = step.describe()
    wte, wpe, block, ln_f = 64 * 32, 32 * 32, 12_704, 2 * 32
    stages = wte + wpe + 2 * block, 2 * block + ln_f + wte  # the head is tied to wte
    assert [x.leaf_bytes for x in found.storage] == [4 * n for n in stages]
    assert [x.gradient_bytes for x in found.storage] == [4 * n for n in stages]
    assert found.gradient_bytes == 4 * max(stages)
    text = str(found)
    shared = 4 * (wte + wpe + ln_f) // 4
    assert (
        f"{4 * 2 * block // 2:,} bytes of its parameters belong to layers of its own stage" in text
    )
    assert f"{shared:,} to leaves that all 4 devices share" in text
    assert "Each device updates what it stores, on the device" in text

    ticked = step_of(Pipeline.from_model(GPT.tiny(layers=4)), 2, 1, 2, 2, weights="tick")
    ticked.abstract_state(batch)
    assert [x.leaf_bytes for x in ticked.describe().storage] == [4 * n // 2 for n in stages]
