"""Advantages and losses of `zeroxla.rlhf`, against float64 loops, closed forms and `jax.grad`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.rlhf.advantages import gae, group_advantages, token_rewards, whiten
from zeroxla.rlhf.losses import (
    entropy,
    grpo_loss,
    kl_estimate,
    masked_mean,
    ppo_loss,
    row_mean,
    target_logprobs,
    value_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# A response of each row: it begins behind a prompt and ends before padding.
RESPONSES = [(2, 7), (0, 9), (4, 5), (3, 9)]
B, T = len(RESPONSES), 9


def mask() -> np.ndarray:
    mask_BT = np.zeros((B, T), np.float32)
    for row, (first, last) in zip(mask_BT, RESPONSES, strict=True):
        row[first:last] = 1
    return mask_BT


def random(*names: str) -> list[np.ndarray]:
    generator = np.random.default_rng(list(map(ord, "".join(names))))
    return [generator.normal(size=(B, T)).astype(np.float32) for _ in names]


class TestGae:
    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
    def test_is_the_double_sum_of_its_definition(self, gamma, lam):
        rewards, values = random("r", "v")
        advantages, returns = gae(rewards, values, mask(), gamma=gamma, lam=lam)
        expected = np.zeros((B, T))
        for b, (first, last) in enumerate(RESPONSES):
            v = [*values[b, first:last].astype(np.float64), 0.0]
            r = rewards[b, first:last].astype(np.float64)
            deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(last - first)]
            for t in range(last - first):
                terms = [(gamma * lam) ** k * d for k, d in enumerate(deltas[t:])]
                expected[b, first + t] = sum(terms)
        np.testing.assert_allclose(advantages, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(returns, (expected + values) * mask(), rtol=2e-6, atol=2e-6)

    def test_with_lambda_one_returns_are_discounted_sums_of_rewards(self):
        rewards, values = random("r", "v")
        _, returns = gae(rewards, values, mask(), gamma=0.9, lam=1.0)
        first, last = RESPONSES[0]
        discounted = sum(0.9**k * r for k, r in enumerate(rewards[0, first:last]))
        assert returns[0, first] == pytest.approx(discounted, rel=1e-5)

    def test_what_is_masked_changes_nothing(self):
        rewards, values = random("r", "v")
        outside = np.where(mask() > 0, 0, np.nan).astype(np.float32)
        plain = gae(rewards, values, mask())
        dirty = gae(rewards + outside, values + outside, mask())
        for x, y in zip(plain, dirty, strict=True):
            np.testing.assert_array_equal(x, y)
            assert np.all(np.asarray(y)[mask() == 0] == 0)


class TestTokenRewards:
    def test_the_score_stands_at_the_last_token_and_straying_costs_at_each(self):
        new, old = random("n", "o")
        scores = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
        found = np.asarray(token_rewards(scores, new, old, mask(), kl=0.3))
        for b, (first, last) in enumerate(RESPONSES):
            expected = -0.3 * (new[b, first:last] - old[b, first:last])
            expected[-1] += scores[b]
            np.testing.assert_allclose(found[b, first:last], expected, rtol=1e-6, atol=1e-6)
        assert np.all(found[mask() == 0] == 0)

    def test_of_equal_policies_the_sum_is_the_score(self):
        (same,) = random("s")
        scores = np.arange(4, dtype=np.float32)
        found = token_rewards(scores, same, same, mask(), kl=10.0)
        np.testing.assert_array_equal(found.sum(axis=1), scores)


class TestGroupAdvantages:
    def test_are_standard_scores_within_each_group(self):
        scores = np.random.default_rng(0).normal(3, 5, 12).astype(np.float32)
        found = np.asarray(group_advantages(scores, 4)).reshape(3, 4)
        groups = scores.astype(np.float64).reshape(3, 4)
        expected = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    def test_of_equal_scores_are_zero(self):
        np.testing.assert_array_equal(group_advantages(jnp.full(6, 0.7), 3), np.zeros(6))

    @pytest.mark.parametrize("group", [1, 5])
    def test_other_numbers_of_rows_are_refused(self, group):
        with pytest.raises(ValueError, match=f"6 rows do not make groups of {group}"):
            group_advantages(jnp.zeros(6), group)


def test_whitened_values_have_mean_zero_and_deviation_one_over_the_mask():
    (x,) = random("x")
    found = np.asarray(whiten(3 + 2 * np.where(mask() > 0, x, np.nan), mask()))
    inside = found[mask() > 0]
    assert inside.mean() == pytest.approx(0, abs=1e-6)
    assert inside.std() == pytest.approx(1, abs=1e-4)
    assert np.all(found[mask() == 0] == 0)


class TestPpoLoss:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "slope"),
        [
            (1.0, 2.0, -2.0),  # inside: the gradient is that of -ratio x advantage
            (1.1, -3.0, 3.3),
            (1.5, 2.0, 0.0),  # better and far enough: held
            (1.5, -2.0, 3.0),  # worse, and drawn more often: not held
            (0.5, -2.0, 0.0),  # worse and drawn seldom enough: held
            (0.5, 2.0, -1.0),  # better, and drawn less often: not held
        ],
    )
    def test_the_clip_holds_on_the_side_that_pays(self, ratio, advantage, slope):
        one, old = jnp.ones((1, 1)), jnp.full((1, 1), -1.3)
        new = old + jnp.log(ratio)

        def loss(new):
            return ppo_loss(new, old, advantage * one, one, clip=0.2)

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(new)
        held = np.clip(ratio, 0.8, 1.2)
        assert value == pytest.approx(-min(ratio * advantage, held * advantage), rel=1e-5)
        assert gradient[0, 0] == pytest.approx(slope, rel=1e-5)
        assert metrics["clipped"] == (slope == 0)

    def test_is_the_mean_over_tokens(self):
        new, old, advantages = random("n", "o", "a")
        found, metrics = ppo_loss(new, old, advantages, mask(), clip=0.2)
        ratio = np.exp(new.astype(np.float64) - old)
        each = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        assert found == pytest.approx(each[mask() > 0].mean(), rel=1e-5)
        held = np.clip(ratio, 0.8, 1.2) * advantages < ratio * advantages
        assert metrics["clipped"] == pytest.approx(held[mask() > 0].mean(), rel=1e-5)
        assert metrics["weight"] == mask().sum()

    def test_its_first_gradient_is_the_policy_gradient(self):
        new, advantages = random("n", "a")
        found = jax.grad(lambda x: ppo_loss(x, new, advantages, mask())[0])(jnp.asarray(new))
        np.testing.assert_allclose(found, -advantages * mask() / mask().sum(), rtol=1e-5)


class TestGrpoLoss:
    def test_is_the_mean_over_rows_of_means_over_tokens(self):
        new, old, ref = random("n", "o", "r")
        advantages = np.array([1.0, -0.5, 2.0, -1.5])
        found, metrics = grpo_loss(new, old, ref, jnp.asarray(advantages), mask(), clip=0.2, kl=0.1)
        rows, divergences, held = [], [], []
        for b, (first, last) in enumerate(RESPONSES):
            at = np.s_[b, first:last]
            ratio = np.exp(new[at].astype(np.float64) - old[at])
            gain = np.minimum(ratio * advantages[b], np.clip(ratio, 0.8, 1.2) * advantages[b])
            held.append((gain < ratio * advantages[b]).mean())
            away = ref[at].astype(np.float64) - new[at]
            divergences.append((np.exp(away) - away - 1).mean())
            rows.append(-gain.mean() + 0.1 * divergences[-1])
        assert found == pytest.approx(np.mean(rows), rel=1e-5)
        assert metrics["divergence"] == pytest.approx(np.mean(divergences), rel=1e-5)
        assert metrics["clipped"] == pytest.approx(np.mean(held), rel=1e-5)
        assert metrics["weight"] == B

    def test_rows_without_a_response_do_not_count(self):
        new, old, ref = random("n", "o", "r")
        advantages = jnp.asarray([1.0, -0.5, 2.0, -1.5])
        masked = mask()
        masked[3] = 0
        found = grpo_loss(new, old, ref, advantages, masked)
        few = grpo_loss(new[:3], old[:3], ref[:3], advantages[:3], mask()[:3])
        assert found[0] == pytest.approx(float(few[0]), rel=1e-6)
        assert found[1]["weight"] == 3


class TestValueLoss:
    @pytest.mark.parametrize(
        ("value", "target", "slope"),
        [
            (0.1, 1.0, -0.9),  # within the clip: the plain error
            (0.5, 1.0, 0.0),  # moved towards the return, and far enough: held
            (-0.5, 1.0, -1.5),  # moved away: pulled back
            (-0.5, -1.0, 0.0),  # as the second, below
            (0.5, -1.0, 1.5),
        ],
    )
    def test_the_clip_holds_values_that_moved_towards_their_return(self, value, target, slope):
        one = jnp.ones((1, 1))

        def loss(x):
            return value_loss(x, 0 * one, target * one, one, clip=0.2)

        (found, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(value * one)
        held = np.clip(value, -0.2, 0.2)
        assert found == pytest.approx(0.5 * max((value - target) ** 2, (held - target) ** 2))
        assert gradient[0, 0] == pytest.approx(slope, rel=1e-5)
        assert metrics["clipped"] == (slope == 0)

    def test_is_the_mean_over_tokens(self):
        arrays = random("v", "o", "r")
        found, metrics = value_loss(*arrays, mask(), clip=0.2)
        values, old, returns = (x.astype(np.float64) for x in arrays)
        held = old + np.clip(values - old, -0.2, 0.2)
        free, held = (values - returns) ** 2, (held - returns) ** 2
        inside = mask() > 0
        assert found == pytest.approx(0.5 * np.maximum(free, held)[inside].mean(), rel=1e-5)
        far = np.abs(values - old) > 0.2
        assert metrics["clipped"] == pytest.approx((far & (held > free))[inside].mean(), rel=1e-5)
        assert metrics["weight"] == inside.sum()

    def test_values_within_the_clip_are_not_clipped_by_rounding(self):
        rng = np.random.default_rng(0)
        old, values, returns = rng.normal(size=(3, 1, 50_000))
        values = old + 0.03 * values
        old, values, returns = (x.astype(np.float32) for x in (old, values, returns))
        assert value_loss(values, old, returns, np.ones_like(old), clip=0.2)[1]["clipped"] == 0


class TestKlEstimate:
    def test_is_zero_exactly_where_both_agree_and_positive_elsewhere(self):
        (x,) = random("x")
        np.testing.assert_array_equal(kl_estimate(x, x), np.zeros((B, T)))
        assert np.all(np.asarray(kl_estimate(x, x + 1e-2)) > 0)
        assert np.all(np.asarray(kl_estimate(x, x - 1e-2)) > 0)

    def test_its_mean_over_the_policy_is_the_divergence(self):
        logits = np.random.default_rng(1).normal(size=(2, 7))
        p, q = (np.exp(x) / np.exp(x).sum() for x in logits)
        estimate = np.asarray(kl_estimate(np.log(p), np.log(q)))
        assert (p * estimate).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)


class TestEntropy:
    def test_of_equal_chances_is_the_logarithm_of_their_number(self):
        np.testing.assert_allclose(entropy(jnp.zeros((1, 2, 8))), np.log(8), rtol=1e-6)

    def test_of_what_cannot_come_is_zero_and_has_a_gradient(self):
        logits = jnp.array([[[0.0, -jnp.inf, 0.0]]])
        assert entropy(logits)[0, 0] == pytest.approx(np.log(2), rel=1e-6)
        assert np.all(np.isfinite(jax.grad(lambda x: entropy(x).sum())(jnp.zeros((1, 1, 3)))))

    def test_is_minus_the_mean_log_probability(self):
        logits = np.random.default_rng(2).normal(size=(1, 3, 5))
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        np.testing.assert_allclose(entropy(logits), -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_log_probabilities_of_targets():
    logits = np.random.default_rng(3).normal(size=(2, 3, 5))
    targets = np.array([[0, 4, 2], [1, 1, 3]])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0])
    np.testing.assert_allclose(target_logprobs(logits, targets), expected, rtol=1e-5)
    narrow = jnp.asarray(logits, jnp.bfloat16)
    found = target_logprobs(narrow, targets)
    assert found.dtype == jnp.float32
    wide = target_logprobs(narrow.astype(jnp.float32), targets)
    np.testing.assert_array_equal(found, wide)  # no sum of exponentials in bfloat16


@pytest.mark.parametrize("mean", [masked_mean, row_mean])
def test_what_is_masked_reaches_neither_a_mean_nor_its_gradient(mean):
    (x,) = random("x")
    dirty = np.where(mask() > 0, x, np.nan)
    value, gradient = jax.value_and_grad(lambda x: mean(x, mask())[0])(jnp.asarray(dirty))
    assert value == mean(x, mask())[0]
    assert np.all(np.asarray(gradient)[mask() == 0] == 0)
    assert mean(x, np.zeros((B, T)))[0] == 0
