"""The numbers that keep random keys apart: distinct where they meet, and never changed."""

import jax
import pytest

from zeroxla.program import random_keys
from zeroxla.program.random_keys import PassRounding, StepRounding, fold_in, number_of

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("purposes", [StepRounding, PassRounding])
def test_no_two_purposes_have_the_same_number(purposes):
    count = 5
    numbers = [number_of(purpose, i, count) for purpose in purposes for i in range(count)]
    assert sorted(numbers) == list(range(count * len(purposes)))


def test_the_numbers_are_those_of_every_training_so_far():
    """A checkpoint goes on with the same draws only as long as none of them changes."""
    assert (random_keys.STATE, random_keys.EVALUATION) == (1, 0)
    assert (random_keys.ROUNDINGS, random_keys.UNIT_GATHERS) == (0x77697265, 2**31 - 1)
    assert random_keys.SAMPLES == 2**31
    assert list(StepRounding) == [
        StepRounding.GATHER,
        StepRounding.CORRECTED_NODE_HOP,
        StepRounding.NODE_HOP,
        StepRounding.REDUCE,
        StepRounding.COPY,
    ]
    assert list(PassRounding) == [PassRounding.SEGMENT, PassRounding.REDUCE]


def test_no_key_gives_no_key():
    assert fold_in(None, 3) is None
    key = jax.random.key(0)
    assert (
        jax.random.key_data(fold_in(key, 3)) == jax.random.key_data(jax.random.fold_in(key, 3))
    ).all()
