"""DPO: the loss against float64, pairs as rows, and training on which margins rise."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import rlhf
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
LENGTH = 9


def dpo64(chosen, rejected, ref_chosen, ref_rejected, mask, beta, smoothing):
    """The published formula, one pair at a time, in float64."""
    rows = []
    for c, r, rc, rr, counts in zip(chosen, rejected, ref_chosen, ref_rejected, mask):
        if counts:
            margin = beta * ((float(c) - float(rc)) - (float(r) - float(rr)))
            likely = 1 / (1 + np.exp(-np.float64(margin)))
            loss = -(1 - smoothing) * np.log(likely) - smoothing * np.log(1 - likely)
            rows.append((loss, margin, margin > 0))
    return np.mean(rows, axis=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_formula_and_so_is_its_gradient(smoothing):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(-20, 8, 6).astype(np.float32) for _ in range(4)]
    mask = np.array([1, 1, 0, 1, 1, 1], np.float32)
    arrays[0][2] = np.nan  # a pair that does not count
    options = {"beta": 0.3, "label_smoothing": smoothing}

    def loss(chosen, rejected):
        return rlhf.dpo_loss(chosen, rejected, *arrays[2:], mask, **options)

    (value, metrics), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arrays[:2])
    want = dpo64(*arrays, mask, 0.3, smoothing)
    found = [value, metrics["margin"], metrics["accuracy"]]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert metrics["weight"] == 5
    assert metrics["margin"] == pytest.approx(
        float(metrics["chosen_reward"] - metrics["rejected_reward"]), rel=1e-5
    )
    step = 1e-5
    for i in range(6):
        for side in range(2):
            moved = [[np.array(x, np.float64) for x in arrays] for _ in range(2)]
            moved[0][side][i] += step
            moved[1][side][i] -= step
            up, down = (dpo64(*x, mask, 0.3, smoothing)[0] for x in moved)
            assert float(grads[side][i]) == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_a_pair_far_from_the_reference_has_no_infinite_loss():
    far = jnp.array([-1e4]), jnp.array([0.0])
    value, _ = rlhf.dpo_loss(*far, jnp.zeros(1), jnp.zeros(1), jnp.ones(1), beta=1.0)
    assert float(value) == pytest.approx(1e4)


def test_lengths_are_normalized_if_asked():
    settings = rlhf.DpoSettings(length=5, rows=2, length_normalized=True)
    logprobs = np.array([[-1.0, -2.0, np.nan, -3.0], [-4.0, np.nan, np.nan, np.nan]], np.float32)
    mask = np.array([[1, 1, 0, 1], [1, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(settings.of_rows(logprobs, mask), [-2.0, -4.0])
    np.testing.assert_allclose(settings.of_rows(jnp.asarray(logprobs), mask), [-2.0, -4.0])
    plain = rlhf.DpoSettings(length=5, rows=2)
    np.testing.assert_allclose(plain.of_rows(logprobs, mask), [-6.0, -4.0])
    none = np.zeros_like(mask)
    for same in (settings, plain):
        np.testing.assert_array_equal(same.of_rows(logprobs, none), [0, 0])


def random_pairs(rows):
    """Pairs whose chosen responses are made of the token 3, and the others of any."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 64, rng.integers(1, 4)) for _ in range(rows)]
    chosen = [np.full(rng.integers(2, 6), 3) for _ in range(rows)]
    rejected = [rng.integers(4, 64, rng.integers(2, 6)) for _ in range(rows)]
    return rlhf.Pairs.of(prompts, chosen, rejected, length=LENGTH, pad=7)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_a_step_reads_the_settings_and_the_batch(smoothing):
    options = {"beta": 0.7, "label_smoothing": smoothing}
    settings = rlhf.DpoSettings(length=LENGTH, rows=4, length_normalized=True, **options)
    pairs, rng = random_pairs(4), np.random.default_rng(2)
    masks = pairs.chosen_mask_BT.copy(), pairs.rejected_mask_BT.copy()
    masks[0][1] = 0  # the first two of these pairs count nothing
    masks[1][2] = 0
    reference = rng.normal(-3, 1, (2, 4)).astype(np.float32)
    table = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    batch = {
        **{"chosen": pairs.chosen_BL, "rejected": pairs.rejected_BL},
        **{"chosen_mask": masks[0], "rejected_mask": masks[1]},
        **{"ref_chosen": reference[0], "ref_rejected": reference[1]},
    }
    value, metrics = rlhf.preference_loss(settings)(lambda x: table[x], batch, train=True)
    means = []
    for rows, mask in zip((pairs.chosen_BL, pairs.rejected_BL), masks, strict=True):
        logprobs = np.asarray(rlhf.target_logprobs(table[rows[:, :-1]], rows[:, 1:]))
        means.append((logprobs * mask).sum(1) / np.maximum(mask.sum(1), 1))
    want, margin, accuracy = dpo64(*means, *reference, [1, 0, 0, 1], 0.7, smoothing)
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert float(metrics["margin"]) == pytest.approx(margin, rel=1e-4)
    assert (metrics["accuracy"], metrics["weight"]) == (accuracy, 2)


def test_a_pair_whose_responses_are_alike_is_not_accurate():
    same = jnp.array([-3.0])
    assert rlhf.dpo_loss(same, same, same, same, jnp.ones(1))[1]["accuracy"] == 0


def test_pairs_are_rows():
    pairs = rlhf.Pairs.of([[1, 2], [3]], [[4], [5, 6]], [[7, 8], [9]], length=5)
    np.testing.assert_array_equal(pairs.chosen_BL, [[1, 2, 4, 0, 0], [3, 5, 6, 0, 0]])
    np.testing.assert_array_equal(pairs.chosen_mask_BT, [[0, 1, 0, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(pairs.rejected_BL, [[1, 2, 7, 8, 0], [3, 9, 0, 0, 0]])
    np.testing.assert_array_equal(pairs.rejected_mask_BT, [[0, 1, 1, 0], [1, 0, 0, 0]])
    assert len(pairs) == 2
    padded = rlhf.Pairs.of([[1]], [[2, 3]], [[4]], length=3, pad=9)  # one row is full
    np.testing.assert_array_equal(padded.chosen_BL, [[1, 2, 3]])
    np.testing.assert_array_equal(padded.rejected_BL, [[1, 4, 9]])
    with pytest.raises(ValueError, match="1 prompts, 2 chosen and 1 rejected"):
        rlhf.Pairs.of([[1]], [[1], [2]], [[1]], length=5)
    with pytest.raises(ValueError, match="pair 0 has a prompt and a response of 6 tokens"):
        rlhf.Pairs.of([[1, 2, 3]], [[1, 2, 3]], [[1]], length=5)
    with pytest.raises(ValueError, match="pair 0 has an empty prompt or response"):
        rlhf.Pairs.of([[1]], [[]], [[1]], length=5)
    with pytest.raises(ValueError, match="pair 1 has an empty prompt or response"):
        rlhf.Pairs.of([[1], []], [[1], [1]], [[1], [1]], length=5)


def begun(storage, tensor=1):
    # Adapters that are scaled up by their rank move the model further in a step.
    rate = 5e-3 if storage.rank_stabilized else 2e-2
    mesh, model = zeroxla.make_mesh(nodes=2, devices_per_node=4), GPT.tiny()
    settings = rlhf.DpoSettings(length=LENGTH, rows=16, beta=0.5)
    plain = zeroxla.make_step(model, mesh)
    params = plain.init(KEY, {"tokens": np.zeros((8, LENGTH), int)}).params
    whole = zeroxla.full_params(plain.init(KEY, {"tokens": np.zeros((8, LENGTH), int)}))
    trainer = rlhf.dpo(
        model, mesh, settings, optimizer=optax.adam(rate), storage=storage, tensor=tensor
    )
    return trainer, trainer.begin(params, KEY), whole


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(rlhf.Storage(frozen=None), marks=pytest.mark.slow),
        pytest.param(rlhf.Storage(rank=4, dora=True, frozen="int8"), marks=pytest.mark.slow),
        pytest.param(rlhf.Storage(rank=4, rank_stabilized=True), marks=pytest.mark.slow),
    ],
    ids=["whole", "dora", "rslora"],
)
def test_margins_rise_and_the_reference_stays(storage):
    trainer, states, params = begun(storage, tensor=2)
    pairs = random_pairs(16)
    columns = trainer.score(states, pairs)
    if storage.frozen is None:  # the reference is what was given
        for side, name in ((pairs.chosen_BL, "chosen"), (pairs.rejected_BL, "rejected")):
            logits = jax.jit(GPT.tiny().apply)({"params": params}, side[:, :-1])
            logprobs = rlhf.target_logprobs(logits, side[:, 1:])
            want = (logprobs * columns[f"{name}_mask"]).sum(1)
            np.testing.assert_allclose(columns[f"ref_{name}"], want, rtol=1e-4)
    found = []
    for _ in range(8):
        states, metrics = trainer.train(states, columns)
        found.append(metrics)
    assert found[0]["loss"] == pytest.approx(np.log(2), abs=5e-3)
    assert found[0]["margin"] == pytest.approx(0, abs=1e-2)
    assert found[-1]["margin"] > 0.5
    assert found[-1]["loss"] < 0.65 * found[0]["loss"]
    assert found[-1]["accuracy"] == 1
    assert not any(metrics["skipped"] for metrics in found)
    after = trainer.score(states, pairs)
    np.testing.assert_allclose(after["ref_chosen"], columns["ref_chosen"], rtol=1e-4)
    nothing = {**columns, "ref_chosen": np.full_like(columns["ref_chosen"], np.nan)}
    assert trainer.train(states, nothing)[1]["skipped"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0}, "beta=0 must be above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 must be 0 or more and below 0.5"),
        ({"length": 1}, "length=1 must be 2 or more"),
        ({"rows": 0}, "rows=0 must be 1 or more"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        rlhf.DpoSettings(**{"length": 9, "rows": 8, **options})


def test_other_misuse(mesh24):
    settings = rlhf.DpoSettings(length=9, rows=16)
    with pytest.raises(ValueError, match="on a mesh of 2 stages"):
        rlhf.dpo(GPT.tiny(), zeroxla.make_mesh(nodes=1, devices_per_node=4, pipe=2), settings)
    context = GPT.tiny().length
    long = rlhf.DpoSettings(length=context + 2, rows=16)
    words = f"length={context + 2} tokens of a row, and the model's context is {context}"
    with pytest.raises(ValueError, match=words):
        rlhf.dpo(GPT.tiny(), mesh24, long)
    short = rlhf.Pairs.of([[1]], [[2]], [[3]], length=5)
    with pytest.raises(ValueError, match=r"are not the rows=16 of length=9 of the settings"):
        rlhf.Dpo.score(SimpleNamespace(settings=settings), None, short)
    loss = rlhf.preference_loss(settings)
    actor = rlhf.Policy(step=zeroxla.make_step(GPT.tiny(), mesh24, loss=loss))
    with pytest.raises(ValueError, match="pass reference="):
        rlhf.Dpo(settings, actor=actor)
