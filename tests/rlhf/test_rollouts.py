"""Rollouts: the places of prompts, responses and their numbers in rows, and minibatches."""

from __future__ import annotations

import numpy as np
import pytest

from zeroxla import Generated
from zeroxla.rlhf.rollouts import Rollouts, minibatches

PROMPTS = [[5, 6, 7], [8], [9, 10]]


def generated() -> Generated:
    """Responses of 2, 3 and 1 tokens."""
    tokens = np.array([[11, 12, 0], [13, 14, 15], [16, 0, 0]], np.int32)
    logprobs = np.array([[-1, -2, 0], [-3, -4, -5], [-6, 0, 0]], np.float32)
    lengths = np.array([2, 3, 1], np.int32)
    return Generated(
        tokens=tokens, lengths=lengths, logprobs=logprobs, reshard_s=0.0, generate_s=0.0
    )


@pytest.fixture
def rollouts():
    return Rollouts.of(PROMPTS, generated(), length=6, pad=99)


class TestRollouts:
    def test_rows_are_prompt_response_and_padding(self, rollouts):
        expected = [[5, 6, 7, 11, 12, 99], [8, 13, 14, 15, 99, 99], [9, 10, 16, 99, 99, 99]]
        np.testing.assert_array_equal(rollouts.tokens_BL, expected)
        assert [list(r) for r in rollouts.responses()] == [[11, 12], [13, 14, 15], [16]]
        assert [list(p) for p in rollouts.prompts()] == PROMPTS

    def test_the_mask_chooses_the_targets_of_the_response(self, rollouts):
        """Target t of a row is its token t + 1."""
        targets = rollouts.tokens_BL[:, 1:]
        chosen = [list(row[keep > 0]) for row, keep in zip(targets, rollouts.mask_BT)]
        assert chosen == [[11, 12], [13, 14, 15], [16]]

    def test_log_probabilities_stand_at_their_targets(self, rollouts):
        np.testing.assert_array_equal(
            rollouts.logprobs_BT, [[0, 0, -1, -2, 0], [-3, -4, -5, 0, 0], [0, -6, 0, 0, 0]]
        )

    def test_the_last_token_is_that_of_the_response(self, rollouts):
        np.testing.assert_array_equal(rollouts.at_last(rollouts.tokens_BL), [12, 15, 16])

    def test_rows_that_are_too_short_are_refused(self):
        with pytest.raises(ValueError, match="have 5 tokens, and rows are 4 long"):
            Rollouts.of(PROMPTS, generated(), length=4)

    def test_other_prompts_are_refused(self):
        with pytest.raises(ValueError, match="2 prompts and 3 responses"):
            Rollouts.of(PROMPTS[:2], generated(), length=6)


class TestMinibatches:
    columns = {"row": np.arange(12), "twice": 2 * np.arange(12)}  # noqa: RUF012

    def test_every_row_comes_once_in_an_epoch_with_all_its_columns(self):
        found = list(minibatches(self.columns, 4, epochs=2, seed=[0]))
        assert [len(batch["row"]) for batch in found] == [4] * 6
        for epoch in (found[:3], found[3:]):
            rows = np.concatenate([batch["row"] for batch in epoch])
            assert sorted(rows) == list(range(12))
        assert all(np.array_equal(batch["twice"], 2 * batch["row"]) for batch in found)

    def test_the_order_is_of_the_seed_and_another_in_each_epoch(self):
        def order(seed):
            batches = minibatches(self.columns, 12, epochs=2, seed=seed)
            return [batch["row"].tolist() for batch in batches]

        first, second = order([1, 2])
        assert first != second
        assert order([1, 2]) == [first, second]
        assert order([1, 3])[0] != first

    def test_sizes_that_do_not_divide_are_refused(self):
        with pytest.raises(ValueError, match="12 rows do not divide into minibatches of 5"):
            minibatches(self.columns, 5, epochs=1, seed=[0])

    def test_columns_of_other_lengths_are_refused(self):
        with pytest.raises(ValueError, match="different numbers of rows"):
            minibatches({"a": np.zeros(3), "b": np.zeros(4)}, 1, epochs=1, seed=[0])
