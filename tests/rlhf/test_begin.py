"""How a loop begins: parameters on disk, and models that keep a state between steps."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.rlhf import CONFIG, VOCAB, model, num_wires, prompts, settings, share_of_wanted, wide

import zeroxla
from zeroxla import Offload, rlhf
from zeroxla.models.losses import next_token_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(1)
BATCH = {"tokens": np.zeros((8, 9), np.int32)}


class Normed(nn.Module):
    """A language model with batch statistics."""

    length: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Embed(VOCAB, 16)(tokens)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(VOCAB)(nn.tanh(nn.Dense(16)(x)))

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> jax.Array:
        return next_token_loss(self(batch["tokens"][:, :-1], train=train), batch)[0]


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=1, devices_per_node=2)


def iterated(mesh, config, params_of, *, algorithm="ppo", module=None, model_state=None, **storage):
    """Metrics of two iterations of a loop that begins with a state of `params_of`'s."""
    module = module or model()
    chosen = settings(algorithm)
    loop = rlhf.make_loop(
        module,
        mesh,
        chosen,
        reward=share_of_wanted,
        optimizer=optax.adam(3e-2),
        config=config,
        storage=rlhf.Storage(**storage) if storage else None,
    )
    states = loop.begin(params_of.params, KEY, model_state)
    found = []
    for i in range(2):
        key = jax.random.fold_in(KEY, i)
        states, metrics = loop.iterate(states, prompts(chosen), key)
        found.append({name: x for name, x in metrics.items() if not name.endswith("_s")})
    return states, found


def first(mesh, config, module=None):
    step = zeroxla.make_step(module or model(), mesh, optax.sgd(0.1), config=config)
    return step, step.init(jax.random.key(0), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "storage"),
    [("grpo", {}), ("ppo", {}), ("ppo", {"frozen": "int8", "rank": 2})],
)
def test_parameters_on_disk(mesh, tmp_path, algorithm, storage):
    """Actor, critic and reference share a folder, and learn what they learn in memory."""
    disk = Offload(optimizer="disk", params="disk", path=str(tmp_path))
    found = []
    for config in (CONFIG, dataclasses.replace(CONFIG, offload=disk)):
        _, state = first(mesh, config, wide())
        kept = {"algorithm": algorithm, "module": wide(), **storage}
        states, metrics = iterated(mesh, config, state, **kept)
        stored = states.actor if states.reference is None else states.reference
        assert num_wires(stored) == 4
        found.append(metrics)
    assert found[0] == found[1]


@pytest.mark.slow
def test_trained_statistics_go_with_the_weights(mesh):
    step, state = first(mesh, CONFIG, Normed())
    rng = np.random.default_rng(0)
    for _ in range(2):
        state, _ = step(state, {"tokens": rng.integers(0, 4, (8, 9), dtype=np.int32)})
    mean = np.asarray(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
    loop = rlhf.make_loop(
        Normed(),
        mesh,
        settings("grpo"),
        reward=share_of_wanted,
        storage=rlhf.Storage(frozen=None),
        config=CONFIG,
    )
    states = loop.begin(state.params, KEY, state.model_state)
    for begun in (states.actor, states.reference):
        found = begun.model_state["batch_stats"]["BatchNorm_0"]["mean"]
        np.testing.assert_array_equal(found, mean)
    assert np.any(mean)
    loop.iterate(states, prompts(loop.settings), KEY)
    np.testing.assert_array_equal(  # the given state is still there
        state.model_state["batch_stats"]["BatchNorm_0"]["mean"], mean
    )
    with pytest.warns(UserWarning, match="none was given: it starts fresh"):
        loop.begin(state.params, KEY)
    wrong = jax.tree.map(lambda x: x[:3], state.model_state)
    with pytest.raises(ValueError, match=r"batch_stats/BatchNorm_0/mean is float32\[3\], and"):
        loop.begin(state.params, KEY, wrong)
