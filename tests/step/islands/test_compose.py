"""Islands with the rest of zeroxla: with an exchange after each step they are data parallelism."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.islands import KEY, MODEL, TOKEN, batches, copies, make_step, params, trained
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig, rlhf
from zeroxla.config.outer import Outer
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")
OUTER = Outer(every=1, optimizer=optax.sgd(1.0))


class Normed(nn.Module):
    """Batch statistics, which stay each island's own."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.tanh(x))

    def loss(self, batch, *, train):
        logits = self(batch["image"], train=train)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()


def words(num):
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 64, (16, 9)).astype(np.int32)} for _ in range(num)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class With:
    """A feature that islands are combined with.

    Attributes:
      model: the model, or a function that makes it.
      config: options of the inner steps.
      mesh: arguments of `make_mesh`, of an island and of the reference.
      rows: makes batches.
      error: the largest difference from data parallelism; None where it is another computation.
    """

    model: object = MODEL
    config: dict = dataclasses.field(default_factory=dict)
    mesh: dict = dataclasses.field(default_factory=dict)
    rows: object = batches
    error: float | None = 1e-5


def preset(name, **options):
    """Return the options of a preset that are not the default's."""
    found, plain = getattr(ZeroConfig, name)(**options), ZeroConfig()
    names = [f.name for f in dataclasses.fields(found)]
    return {n: getattr(found, n) for n in names if getattr(found, n) != getattr(plain, n)}


CASES = {
    "zero3": With(),
    "zeropp": With(
        # Wires of other shards round otherwise.
        config=preset("zeropp", quantize_threshold=0),
        mesh={"nodes": 2},
        error=0.02,
    ),
    "zeropp_min": With(
        config=preset("zeropp_min", quantize_threshold=0), mesh={"nodes": 2}, error=0.02
    ),
    "accumulate": With(config={"accumulate": 2}),
    "batch statistics": With(model=Normed()),
    "LoRA, int4 base": With(
        model=lambda: zeroxla.lora(GPT.tiny(width=64), targets="kernel$", rank=2, frozen="int4"),
        rows=words,
    ),
    "frozen": With(config={"frozen": "bias$"}),
    "offload": With(config={"offload": Offload(optimizer="host", params="host")}),
    "pipeline": With(
        model=lambda: zeroxla.Pipeline.from_model(GPT.tiny(layers=2)),
        config={"accumulate": 2},
        mesh={"pipe": 2},
        rows=words,
    ),
    "tensor": With(
        model=lambda: GPT.tiny(), mesh={"nodes": 1, "devices_per_node": 4, "tensor": 2}, rows=words
    ),
    "pipeline, context": With(
        model=lambda: zeroxla.Pipeline.from_model(GPT.tiny(layers=2)),
        config={"accumulate": 2},
        mesh={"pipe": 2, "nodes": 1, "context": 2},
        rows=words,
    ),
    # With a larger scale some of the first steps are skipped: on an island, or everywhere.
    "float16": With(config={"compute_dtype": "float16", "init_loss_scale": 256.0}, error=2e-3),
    "bfloat16": With(config={"compute_dtype": "bfloat16"}, error=2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_islands_with(name):
    case, num = CASES[name], 3
    rows = case.rows(num)

    def model():
        return case.model if isinstance(case.model, nn.Module) else case.model()

    _, states, metrics = trained(OUTER, 2, rows, model=model(), mesh=case.mesh, **case.config)
    for a, b in zip(*map(copies, states), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.isfinite(x["loss"]) for island in metrics for x in island)
    mesh = zeroxla.make_mesh(**{"nodes": 2, **case.mesh})
    config = ZeroConfig(**{"persistence_threshold": 0, **case.config})
    step = zeroxla.make_step(model(), mesh, optax.sgd(0.1), config=config)
    state = step.init(KEY, rows[0])
    start = zeroxla.full_params(state)
    for batch in rows:
        state, _ = step(state, batch)
    expected = zeroxla.full_params(state)
    moved = 0.0
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        for mine in states:
            have = dict(jax.tree_util.tree_leaves_with_path(params(mine)))[path]
            np.testing.assert_allclose(have, want, atol=case.error, err_msg=str(path))
        before = dict(jax.tree_util.tree_leaves_with_path(start))[path]
        moved = max(moved, float(np.abs(np.asarray(want, np.float32) - before).max()))
    assert moved > 1e-3


def test_a_state_on_disk_is_refused(tmp_path):
    disk = Offload(optimizer="disk", params="disk", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"exchanges parameters from memory; take Offload\(params"):
        zeroxla.Island(make_step(OUTER, 0, 1, offload=disk), "127.0.0.1:1", TOKEN)


def test_a_config_without_exchanges_is_refused():
    with pytest.raises(ValueError, match=r"does not say how islands exchange; .*ZeroConfig.diloco"):
        zeroxla.Island(make_step(None, 0, 1), "127.0.0.1:1", TOKEN)


@pytest.mark.parametrize("every", [1, 5, 100])
def test_presets(every):
    diloco, streaming = ZeroConfig.diloco(every=every), ZeroConfig.streaming(every=every)
    assert diloco.outer == dataclasses.replace(diloco.outer, wire=None, fragments=1, delay=0)
    assert diloco.outer.every == streaming.outer.every == every
    assert streaming.outer.wire.bits == 4
    assert streaming.outer.fragments == min(10, every)
    assert ZeroConfig.streaming(accumulate=4).accumulate == 4
    mixed = ZeroConfig.zeropp(outer=ZeroConfig.streaming().outer)
    assert mixed.outer.delay == 5


@pytest.mark.slow
def test_each_island_keeps_its_own_statistics():
    _, states, _ = trained(OUTER, 2, batches(2), model=Normed())
    one, two = (jax.tree.leaves(s.inner.model_state) for s in states)
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_any_optimizer_trains_inside_an_island():
    """Muon reads whole matrices; the outer optimizer sees vectors (MuLoCo, arXiv 2505.23725)."""
    outer = ZeroConfig.streaming(every=4).outer
    rows = batches(1) * 9  # labels are random: it learns them by heart
    _, states, metrics = trained(outer, 2, rows, optimizer=optax.contrib.muon(0.02))
    for a, b in zip(*map(copies, states), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(island[-1]["loss"] < island[0]["loss"] for island in metrics)


def test_a_step_with_exchanges_is_not_trained_alone():
    """Alone it would exchange nothing, and say nothing about it."""
    rows, outer = batches(1)[0], ZeroConfig.diloco(every=7).outer
    step = make_step(outer, 0, 1)
    state = step.init(KEY, rows)
    with pytest.raises(ValueError, match=r"outer=Outer\(every=7.*zeroxla.Island\(step\).*with_con"):
        step(state, rows)
    assert "every 7 steps islands exchange what has changed (outer: " in str(step.describe())
    step.eval(state, rows)
    step.grad(state, rows)
    alone = step.with_config(dataclasses.replace(step.config, outer=None))
    assert "outer" not in str(alone.describe())
    alone(state, rows)


def test_a_pipeline_with_exchanges_is_not_trained_alone():
    batch = np.ones((8, 4), np.float32)

    def loss(y_BD, batch):
        return jnp.mean(y_BD**2)

    pipeline = zeroxla.Pipeline([nn.Dense(4), nn.tanh, nn.Dense(1)], loss)
    mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=2)
    step = zeroxla.make_step(pipeline, mesh, config=ZeroConfig.streaming(persistence_threshold=0))
    state = step.init(KEY, batch)
    with pytest.raises(ValueError, match=r"outer=Outer\(.*the step trains as an island"):
        step(state, batch)
    assert "every 100 steps islands exchange" in str(step.describe())


def test_trainers_that_call_steps_themselves_refuse_exchanges():
    mesh, config = zeroxla.make_mesh(nodes=1, devices_per_node=2), ZeroConfig.diloco()
    message = r"the config has outer=Outer\(.*leave outer out"
    with pytest.raises(ValueError, match=message):
        rlhf.dpo(GPT.tiny(), mesh, rlhf.DpoSettings(length=6, rows=2), config=config)
    settings = rlhf.Settings(prompt_length=2, new_tokens=4, rows=8, group=4)
    with pytest.raises(ValueError, match=message):
        rlhf.make_loop(GPT.tiny(), mesh, settings, reward=len, config=config)
