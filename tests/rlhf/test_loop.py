"""The loop of `zeroxla.rlhf`: it learns, it repeats itself, and its gradients are the batch's."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rlhf import (
    PROMPTS,
    VOCAB,
    begin,
    num_wires,
    prompts,
    settings,
    share_of_wanted,
    wide,
)

import zeroxla
from zeroxla import rlhf
from zeroxla.models import GPT, Llama
from zeroxla.rlhf.objectives import batch_shapes, critic_shapes

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALGORITHMS = ["grpo", "ppo"]
# The parts of an iteration of PPO are in quick tests; whole iterations are slow.
QUICK_FIRST = thinned(["grpo"], slow=["ppo"])


class OnDemand(dict):
    """A dict that makes a missing value with a function of its key, an algorithm."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, name):
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=1, devices_per_node=2)


@pytest.fixture(scope="module")
def begun(mesh):
    """A loop of each algorithm."""
    return OnDemand(lambda name: begin(mesh, settings(name)))


@pytest.fixture(scope="module")
def improved(begun):
    """States and metrics of each after 8 iterations."""
    return OnDemand(lambda name: begun[name].iterate(8))


def equal_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("algorithm", QUICK_FIRST)
class TestIterations:
    def test_the_reward_rises(self, improved, algorithm):
        rewards = [metrics["reward"] for metrics in improved[algorithm][1]]
        assert rewards[0] < 0.2
        assert rewards[-1] > rewards[0] + 0.3

    def test_the_actor_leaves_the_reference_from_where_it_began(self, improved, algorithm):
        found = [metrics["kl"] for metrics in improved[algorithm][1]]
        assert found[0] == pytest.approx(0, abs=1e-5)
        assert found[-1] > 0.05

    def test_the_same_key_gives_the_same_metrics_and_states(self, begun, improved, algorithm):
        states, metrics = begun[algorithm].iterate(2)
        for mine, other in zip(metrics, improved[algorithm][1]):
            names = [name for name in mine if not name.endswith("_s")]
            assert {n: mine[n] for n in names} == {n: other[n] for n in names}
        again, _ = begun[algorithm].iterate(2)
        assert equal_bits(states.actor.params, again.actor.params)

    def test_another_key_draws_other_responses(self, begun, improved, algorithm):
        _, metrics = begun[algorithm].iterate(1, seed=1)
        assert metrics[0]["reward"] != improved[algorithm][1][0]["reward"]

    def test_the_phases_are_timed(self, improved, algorithm):
        for metrics in improved[algorithm][1]:
            assert all(metrics[f"{phase}_s"] > 0 for phase in ("generate", "score", "train"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_generating_and_scoring_change_no_state(begun, algorithm):
    mine = begun[algorithm]
    states, before = mine.states(), mine.states()
    rollouts = mine.loop.generate(states, prompts(mine.loop.settings), jax.random.key(0))
    mine.loop.score(states, rollouts)
    for mine, other in ((states.actor, before.actor), (states.critic, before.critic)):
        if mine is not None:
            assert equal_bits((mine.params, mine.opt_state), (other.params, other.opt_state))


def test_responses_to_a_prompt_stand_next_to_each_other(begun):
    mine = begun["grpo"]
    rollouts = mine.loop.generate(mine.first, PROMPTS, jax.random.key(0))
    assert [list(x) for x in rollouts.prompts()] == [p for p in PROMPTS for _ in range(4)]
    first = [row.tolist() for row in rollouts.responses()[:4]]
    assert len(set(map(tuple, first))) > 1


def test_the_first_step_begins_where_the_responses_were_drawn(begun):
    """Ratios are 1: nothing is held, and the loss is the mean of advantages, which is 0."""
    mine = begun["grpo"]
    rollouts = mine.loop.generate(mine.first, prompts(mine.loop.settings), jax.random.key(0))
    batch = mine.loop.score(mine.first, rollouts).actor
    loss, metrics = objective(mine)(batch)
    assert loss == pytest.approx(0, abs=1e-5)
    assert metrics["clipped"] == 0
    assert metrics["divergence"] == pytest.approx(0, abs=1e-9)


def test_the_critic_learns(begun):
    loop, state = begun["ppo"].loop, begun["ppo"].states().critic
    columns = critic_shapes(loop.settings)
    batch = {name: np.ones(x.shape, x.dtype) for name, x in columns.items()}
    losses = []
    for _ in range(10):
        state, metrics = loop.critic(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(0.5, rel=0.2)
    assert losses[-1] < 0.05


def applied(mine, params=None):
    """The model's call on whole parameters, as a loss sees it."""
    params = mine.params if params is None else params
    return lambda tokens: mine.model.apply({"params": params}, tokens)


def objective(mine):
    """The actor's loss of a whole batch on one device."""
    return jax.jit(partial(rlhf.actor_loss(mine.loop.settings), applied(mine), train=True))


def ragged(chosen: rlhf.Settings) -> dict[str, np.ndarray]:
    """A batch of rows with responses of very different lengths: devices count unlike numbers."""
    generator = np.random.default_rng(0)
    shapes = batch_shapes(chosen)
    batch = {
        name: generator.normal(size=x.shape).astype(x.dtype) * 0.1 for name, x in shapes.items()
    }
    batch["tokens"] = generator.integers(0, VOCAB, shapes["tokens"].shape).astype(np.int32)
    batch["logprobs"] = batch["logprobs"] - np.log(VOCAB).astype(np.float32)
    batch["mask"] = np.zeros_like(batch["mask"])
    for i, row in enumerate(batch["mask"]):
        row[i % 3 : i % 3 + 1 + i * 5 // 8] = 1
    return batch


@pytest.mark.parametrize("algorithm", QUICK_FIRST)
def test_gradients_are_those_of_the_whole_batch(begun, algorithm):
    """Two devices hold rows of unlike lengths; a mean of their means would be another one."""
    mine = begun[algorithm]
    chosen = mine.loop.settings
    batch = ragged(chosen)
    value, found = mine.loop.actor.step.grad(mine.states().actor, batch)

    def loss(params):
        return rlhf.actor_loss(chosen)(applied(mine, params), batch, train=True)[0]

    wanted_value, wanted = jax.jit(jax.value_and_grad(loss))(jax.tree.map(jnp.asarray, mine.params))
    assert value == pytest.approx(float(wanted_value), rel=1e-5)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, atol=1e-5 * scale + 1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_stands_behind_a_response_changes_nothing(begun, algorithm):
    mine = begun[algorithm]
    batch = ragged(mine.loop.settings)
    loss = objective(mine)
    dirty = dict(batch)
    after = np.cumsum(batch["mask"][:, ::-1], axis=1)[:, ::-1] == 0  # no target from here on
    for name in ("logprobs", "ref_logprobs", "advantages"):
        if name in batch and batch[name].ndim == 2:
            dirty[name] = np.where(after, np.nan, batch[name])
    tokens = batch["tokens"].copy()
    tokens[:, 1:] = np.where(after, 7, tokens[:, 1:])
    dirty["tokens"] = tokens
    plain, _ = loss(batch)
    again, _ = loss(dirty)
    assert again == pytest.approx(float(plain), rel=1e-6)
    longer = {name: np.pad(x, ((0, 0), (0, 2))) if x.ndim == 2 else x for name, x in batch.items()}
    padded, _ = loss(longer)
    assert padded == pytest.approx(float(plain), rel=1e-6)


class TestValues:
    def test_are_the_first_logits(self, begun):
        mine = begun["ppo"]
        tokens = np.arange(12).reshape(2, 6) % VOCAB
        found = mine.loop.critic_engine.values(mine.first.critic, tokens)
        wanted = applied(mine)(tokens)[..., 0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)

    def test_a_model_scores_what_it_sees_at_the_last_token(self, begun):
        mine = begun["ppo"]
        rollouts = mine.loop.generate(mine.first, prompts(mine.loop.settings), jax.random.key(0))
        reward = rlhf.ModelReward(engine=mine.loop.critic_engine, state=mine.first.critic)
        found = reward(rollouts)
        logits = applied(mine)(rollouts.tokens_BL)
        for i, (prompt, row) in enumerate(zip(rollouts.prompts(), rollouts.responses())):
            last = len(prompt) + len(row) - 1
            assert found[i] == pytest.approx(float(logits[i, last, 0]), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_an_nnx_actor_learns_what_a_linen_model_rewards(begun, mesh):
    judge = begun["ppo"]
    reward = rlhf.ModelReward(engine=judge.loop.critic_engine, state=judge.first.critic)
    module = Llama.tiny(vocab=VOCAB, length=16, layers=1, width=16, heads=2, kv_heads=1)
    chosen = settings("grpo", kl=0.0, rows=64, minibatch=32)
    _, found = begin(mesh, chosen, reward=reward, module=module).iterate(12)
    rewards = [metrics["reward"] for metrics in found]
    assert np.mean(rewards[-3:]) > rewards[0] + 0.5 * found[0]["reward_std"]


@pytest.mark.slow
def test_an_end_token_ends_responses(begun):
    """The end token counts, what follows does not."""
    end = 5
    chosen = settings("grpo", eos=end, pad=0)
    loop = begun["grpo"].loop
    mine = rlhf.Loop(
        chosen,
        actor=loop.actor,
        reference=loop.reference,
        reward=share_of_wanted,
    )
    rollouts = mine.generate(begun["grpo"].first, prompts(chosen), jax.random.key(0))
    assert (rollouts.lengths_B < chosen.new_tokens).sum() > 0
    for row in rollouts.responses():
        assert not np.any(row[:-1] == end)
        assert row[-1] == end or len(row) == chosen.new_tokens
    np.testing.assert_array_equal(rollouts.mask_BT.sum(axis=1), rollouts.lengths_B)


@pytest.mark.slow
def test_an_actor_with_adapters_is_its_own_reference(mesh):
    """Its base is stored once, in 8 bits, and stays as it is, to the bit."""
    storage = rlhf.Storage(rank=2, targets="kernel")
    mine = begin(mesh, settings("grpo"), storage=storage, module=wide())
    assert mine.first.reference is None
    assert num_wires(mine.first.actor) == 4
    states, metrics = mine.iterate(3)
    first, last = mine.first.actor.params, states.actor.params
    assert equal_bits(first["base"], last["base"])
    assert not equal_bits(first["lora"], last["lora"])
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert abs(metrics[-1]["kl"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [None, "int4"])
def test_a_reference_may_be_stored_otherwise(mesh, frozen):
    mine = begin(mesh, settings("grpo"), storage=rlhf.Storage(frozen=frozen), module=wide())
    assert num_wires(mine.first.reference) == (0 if frozen is None else 4)
    _, metrics = mine.iterate(1)
    kl = metrics[0]["kl"]  # the actor is not rounded
    assert abs(kl) < 1e-6 if frozen is None else 1e-5 < kl < 0.01


class TestMemory:
    @pytest.mark.parametrize("algorithm", QUICK_FIRST)
    def test_states_are_counted_from_their_arrays(self, begun, algorithm):
        mine = begun[algorithm]
        report = rlhf.memory_by_phase(mine.loop, mine.first)
        first = mine.first
        arrays = jax.tree.leaves((first.actor, first.critic, first.reference))
        held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert [row.phase for row in report.rows] == ["generate", "score", "train"]
        assert {row.state_bytes for row in report.rows} == {held}
        whole = sum(x.nbytes for x in jax.tree.leaves(mine.params))
        generate, score, train = report.rows
        assert generate.layout_bytes == pytest.approx(whole, rel=0.1)
        assert score.layout_bytes == pytest.approx(whole, rel=0.1)
        assert train.layout_bytes == 0
        assert all(row.temp_bytes > 0 for row in report.rows)
        assert "generate" in str(report)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"group": 1}, "group=1: GRPO compares"),
            ({"group": 3}, "rows=16 do not divide into group=3"),
            ({"minibatch": 5}, "rows=16 do not divide into minibatch=5"),
            ({"kl": -1.0}, "kl=-1.0 must be 0 or more"),
            ({"clip": 0.0}, "clip=0.0 must be above 0"),
            ({"lam": 1.5}, "lam=1.5 must lie between 0 and 1"),
            ({"new_tokens": 0}, "new_tokens=0 must be 1 or more"),
            ({"algorithm": "dpo"}, "choose 'ppo' or 'grpo'"),
        ],
    )
    def test_of_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            settings(**{"algorithm": "grpo", **options})

    def test_of_critics(self, begun):
        loops = {name: begun[name].loop for name in ALGORITHMS}
        with pytest.raises(ValueError, match="no adapters without which it would be its own ref"):
            rlhf.Loop(settings("grpo"), actor=loops["grpo"].actor, reward=share_of_wanted)
        options = {"reward": share_of_wanted, "reference": loops["ppo"].reference}
        with pytest.raises(ValueError, match="PPO needs the step of a critic"):
            rlhf.Loop(settings("ppo"), actor=loops["ppo"].actor, **options)
        with pytest.raises(ValueError, match="GRPO has no critic"):
            rlhf.Loop(
                settings("grpo"), actor=loops["grpo"].actor, critic=loops["ppo"].critic, **options
            )

    def test_of_rows_longer_than_the_context(self, begun):
        loop = begun["grpo"].loop
        with pytest.raises(ValueError, match="make 17 tokens, and the model's context is 16"):
            rlhf.Loop(
                settings("grpo", new_tokens=14),
                actor=loop.actor,
                reward=share_of_wanted,
                reference=loop.reference,
            )

    def test_of_prompts(self, begun):
        mine = begun["grpo"]
        with pytest.raises(ValueError, match=r"3 prompts in groups of 4 .* pass 4"):
            mine.loop.generate(mine.first, PROMPTS[:3], jax.random.key(0))
        with pytest.raises(ValueError, match="a prompt has 4 tokens, more than prompt_length=3"):
            mine.loop.generate(mine.first, [[1, 2, 3, 4], *PROMPTS[1:]], jax.random.key(0))

    @pytest.mark.parametrize(
        ("scores", "message"),
        thinned(
            [
                (np.array([np.nan, *[0.0] * 15]), r"of the rows \[0\] is not finite"),
                (["x"] * 16, r"the reward returned \['x', .* are no numbers"),
            ],
            slow=[(np.zeros(3), r"of the shape \(3,\) for 16 responses")],
            rows=True,
        ),
    )
    def test_of_rewards(self, begun, scores, message):
        mine = begun["grpo"]
        loop = rlhf.Loop(
            mine.loop.settings,
            actor=mine.loop.actor,
            reference=mine.loop.reference,
            reward=lambda rollouts: scores,
        )
        rollouts = mine.loop.generate(mine.first, PROMPTS, jax.random.key(0))
        with pytest.raises(ValueError, match=message):
            loop.score(mine.first, rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("nodes", "devices", "tensor"), [(2, 2, 1), (2, 4, 2), (1, 1, 1)])
def test_the_first_iteration_is_that_of_any_mesh(improved, algorithm, nodes, devices, tensor):
    other = begin(
        zeroxla.make_mesh(nodes=nodes, devices_per_node=devices),
        settings(algorithm),
        tensor=tensor,
    )
    _, metrics = other.iterate(1)
    for name, value in improved[algorithm][1][0].items():
        if not name.endswith("_s"):
            assert metrics[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_a_text_is_rewarded_without_its_prompt():
    generated = zeroxla.Generated(
        tokens=np.frombuffer(b"ae()", np.uint8).astype(np.int32)[None],
        lengths=np.array([4]),
        logprobs=np.zeros((1, 4), np.float32),
        reshard_s=0.0,
        generate_s=0.0,
    )
    rollouts = rlhf.Rollouts.of([list(b"aaaa")], generated, length=8)
    for name, wanted in {"vowels": 0.5, "brackets": 0.5, "brief": 0.2}.items():
        reward = rlhf.TextReward(
            function=rlhf.REWARDS[name], decode=lambda row: bytes(row).decode()
        )
        assert reward(rollouts) == pytest.approx([wanted])


@pytest.mark.parametrize(
    ("text", "paired"),
    [("", 0), ("()", 2), ("([)]", 0), ("([])", 4), ("(()", 2), ("())(", 2), ("{x}", 2), ("}{", 0)],
)
def test_brackets_must_be_closed_by_their_own_kind_and_in_order(text, paired):
    assert rlhf.REWARDS["brackets"](text) == pytest.approx(paired / max(len(text), 1))


@pytest.mark.slow
def test_actor_critic_and_reference_on_disk_share_a_folder(mesh, improved, tmp_path):
    place = zeroxla.Offload(optimizer="disk", params="disk", path=tmp_path)
    config = zeroxla.ZeroConfig(persistence_threshold=0, offload=place)
    begun = begin(mesh, settings("ppo"), config=config)
    assert len(list(tmp_path.iterdir())) == 3
    states = begun.first
    for i, expected in enumerate(improved["ppo"][1][:2]):
        key = jax.random.fold_in(jax.random.key(0), i)
        states, metrics = begun.loop.iterate(states, prompts(begun.loop.settings), key)
        for name in (name for name in expected if not name.endswith("_s")):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize(
    ("algorithm", "pipe"), thinned([], slow=[("ppo", 2), ("grpo", 2), ("ppo", 4)], rows=True)
)
def test_an_actor_in_stages_gets_the_same_rewards(algorithm, pipe):
    """Greedy or not: the draws follow from the key, and the logits differ by their rounding."""
    module = GPT.tiny(vocab=VOCAB, length=16, layers=3, width=16, heads=2, scan=False)
    config = zeroxla.ZeroConfig(persistence_threshold=0, accumulate=2)
    found = []
    for stages in (1, pipe):
        mesh = zeroxla.make_mesh(pipe=stages, nodes=1, devices_per_node=2)
        begun = begin(mesh, settings(algorithm), module=module, config=config)
        _, metrics = begun.iterate(4)
        names = [name for name in metrics[0] if not name.endswith("_s")]
        found.append([[m[name] for name in names] for m in metrics])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-3, atol=2e-4)


def test_options_of_pipelines_need_stages(mesh):
    with pytest.raises(ValueError, match="on a mesh without stages"):
        begin(mesh, settings("grpo"), pipeline={"schedule": "gpipe"})
