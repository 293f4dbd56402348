"""Batches on axes that split the work on one row: a device is given the parts that it reads."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tools.axis_models import (
    KINDS,
    LENGTH,
    SERIES,
    VOCAB,
    Series,
    assert_equals_whole,
    masked,
    series,
)
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.models import GPT, Mixtral

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = ("node", "device")


def step_of(model, mesh, **options):
    config = zeroxla.ZeroConfig(persistence_threshold=0, **options)
    return zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)


def specs(step, batch, **options):
    shardings = step.batches.shardings(step.batches.checked(batch), **options)
    return {name: sharding.spec for name, sharding in shardings.items()}


def held(batch):
    """Return the bytes of a batch on each device."""
    sizes = {}
    for x in jax.tree.leaves(batch):
        for shard in x.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    return set(sizes.values())


def lines(step):
    """Return the rows of two columns that `describe` prints."""
    rows = (line.strip("│").split("│") for line in str(step.describe()).splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def losses(step, batches):
    """Return the losses of training steps, and of an evaluation at the end."""
    state, found = step.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return [*found, float(step.eval(state, batches[0])["loss"])]


def test_a_device_is_given_its_part_of_a_sequence():
    step, batch = step_of(Series(), zeroxla.make_mesh(nodes=1, context=4)), series(4)
    assert_equals_whole(step, Series, batch)
    placed = step.place(batch)
    assert {x.sharding.spec for x in placed.values()} == {PartitionSpec(ROWS, "context")}
    assert placed["x"].addressable_shards[0].data.shape == (2, SERIES // 4, 8)
    assert held(placed) == {sum(x.nbytes for x in batch.values()) // 8}
    for name, x in placed.items():
        np.testing.assert_array_equal(x, batch[name])
    assert lines(step)["batch: x, y"] == "given as part of dim 1"


def test_the_program_is_given_no_more_than_the_parts():
    """No array of the compiled step has the rows of a device and whole series."""
    step, batch = step_of(Series(), zeroxla.make_mesh(nodes=1, context=4)), series(4)
    text = str(step.lower(step.abstract_state(batch), batch).compile().as_text())
    assert f"f32[2,{SERIES // 4},8]" in text
    assert f"f32[2,{SERIES},8]" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axes", "expected"),
    [
        # The mask is read whole too, for the number of its ones.
        (
            "encoder",
            {"context": 4},
            {
                "tokens": PartitionSpec(ROWS, "context"),
                "targets": PartitionSpec(ROWS, "context"),
                "mask": PartitionSpec(ROWS),
            },
        ),
        (
            "vision transformer",
            {"context": 4},
            {"image": PartitionSpec(ROWS, "context"), "label": PartitionSpec(ROWS)},
        ),
        (
            "U-Net",
            {"expert": 2, "context": 2},
            {
                "image": PartitionSpec(("node", "device", "expert"), "context"),
                "label": PartitionSpec(ROWS),
            },
        ),
        (
            "vision transformer",
            {"expert": 2, "tensor": 2},
            {
                "image": PartitionSpec(("node", "device", "expert")),
                "label": PartitionSpec(("node", "device", "expert")),
            },
        ),
    ],
)
def test_arrays_that_are_read_in_parts_are_given_in_parts(kind, axes, expected):
    mesh = zeroxla.make_mesh(nodes=1, **axes)
    batch = KINDS[kind].batch(2 * mesh.shape["device"])
    step = step_of(KINDS[kind].make(), mesh)
    assert specs(step, batch) == expected


@pytest.mark.slow
def test_tokens_that_become_inputs_and_targets_are_given_whole():
    batch = {"tokens": np.zeros((4, LENGTH + 1), np.int32)}
    step = step_of(GPT.tiny(layers=1), zeroxla.make_mesh(nodes=1, context=4))
    assert specs(step, batch) == {"tokens": PartitionSpec(ROWS)}
    assert lines(step)["batch: tokens"] == "given whole"


@pytest.mark.slow
def test_experts_are_given_their_rows():
    model = Mixtral.tiny(layers=1)
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, VOCAB, (8, LENGTH + 1), np.int32)}
    step = step_of(model, zeroxla.make_mesh(nodes=2, expert=2))
    assert_equals_whole(step, lambda: Mixtral.tiny(layers=1), batch)
    placed = step.place(batch)["tokens"]
    assert placed.sharding.spec == PartitionSpec(("node", "device", "expert"))
    shard = placed.addressable_shards[0]
    assert shard.data.shape == (1, LENGTH + 1)
    assert lines(step)["batch: tokens"] == "given as part of dim 0"


@pytest.mark.slow
def test_batches_of_any_placement_are_taken():
    """As host arrays, placed by rows alone, and placed as the step reads them."""
    mesh = zeroxla.make_mesh(nodes=2, context=2)
    batches = [series(8, seed) for seed in (0, 1)]
    step = step_of(Series(), mesh)
    placed = [step.place(batch) for batch in batches]
    by_rows = [zeroxla.global_batch(batch, mesh) for batch in batches]
    assert held(placed[0]) != held(by_rows[0])
    want = losses(step_of(Series(), zeroxla.make_mesh(nodes=2, devices_per_node=2)), batches)
    for given in (batches, by_rows, placed):
        np.testing.assert_allclose(losses(step, given), want, rtol=5e-6)


@pytest.mark.slow
def test_batches_of_any_placement_are_evaluated():
    mesh, batch = zeroxla.make_mesh(nodes=2, context=2), series(8)
    step = step_of(Series(), mesh)
    state = step.init(jax.random.key(0), batch)
    want = float(step.eval(state, batch)["loss"])
    for given in (zeroxla.global_batch(batch, mesh), step.place(batch)):
        assert float(step.eval(state, given)["loss"]) == pytest.approx(want, rel=5e-6)


@pytest.mark.slow
def test_micro_batches_are_parts_of_sequences_and_whole_rows():
    """Which rows a micro-batch has does not depend on the axes."""
    batches = [series(16, seed) for seed in (0, 1)]
    one = step_of(Series(), zeroxla.make_mesh(nodes=2, devices_per_node=1), accumulate=2)
    want = losses(one, batches)
    both = zeroxla.make_mesh(nodes=2, devices_per_node=4, expert=2, context=2)
    step = step_of(Series(), both, accumulate=2)
    np.testing.assert_allclose(losses(step, batches), want, rtol=5e-6)


@pytest.mark.slow
def test_micro_batches_are_given_with_whole_rows():
    """And a batch that is evaluated at once is split over experts too."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4, expert=2, context=2)
    step, batch = step_of(Series(), mesh, accumulate=2), series(16)
    assert specs(step, batch)["x"] == PartitionSpec(ROWS, "context")
    spec = PartitionSpec(("node", "device", "expert"), "context")
    assert specs(step, batch, train=False)["x"] == spec
    placed = step.place(batch, train=False)
    assert placed["x"].addressable_shards[0].data.shape == (4, SERIES // 2, 8)


@pytest.mark.slow
def test_stages_are_given_parts():
    model = GPT.tiny(layers=2)

    def loss(apply, batch, *, train):
        logits = apply(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    batch = {name: x for name, x in masked(8).items() if name != "mask"}
    found = []
    for axes in ({}, {"context": 2}):
        size = 4 * axes.get("context", 1)
        mesh = zeroxla.make_mesh(nodes=1, pipe=2, devices=jax.devices()[:size], **axes)
        pipeline = zeroxla.Pipeline.from_model(model, loss=loss)
        step = zeroxla.make_step(pipeline, mesh, optax.sgd(0.1), microbatches=2)
        found.append(losses(step, [batch, batch]))
    np.testing.assert_allclose(found[1], found[0], rtol=5e-6)
    assert specs(step, batch) == dict.fromkeys(batch, PartitionSpec(ROWS, "context"))
    assert lines(step)["batch: targets, tokens"] == "given as part of dim 1"


@pytest.mark.slow
def test_the_description_says_what_is_given_in_parts():
    step = step_of(KINDS["encoder"].make(), zeroxla.make_mesh(nodes=1, context=4))
    step.abstract_state(masked(4))
    assert lines(step)["batch: targets, tokens"] == "given as part of dim 1"
    assert lines(step)["batch: mask"] == "given whole"


def test_a_plan_counts_the_parts_of_a_batch():
    sizes = []
    for axes in ({"device": 2}, {"device": 2, "context": 4}):
        plan = zeroxla.plan(Series(), {"node": 1, **axes}, series(4), optimizer=optax.sgd(0.1))
        sizes.append(plan.memory.other_bytes)
    whole = sum(x.nbytes for x in series(4).values()) // 2
    assert sizes[0] - sizes[1] == whole - whole // 4


def test_rows_that_do_not_divide_are_refused_where_they_are_placed():
    step = step_of(Series(), zeroxla.make_mesh(nodes=1, context=4))
    with pytest.raises(ValueError, match="batch of 3 does not divide over 2 devices"):
        step.place(series(3))
    with pytest.raises(ValueError, match="is a scalar"):
        step.place({"x": np.float32(1)})
