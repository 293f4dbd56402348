"""Lowered rotary frequencies, against loops over the published formulas in float64."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from zeroxla.models.rope_scaling import RopeScaling

THETA, COUNT, LENGTH = 1e4, 8, 64
FREQUENCIES = THETA ** (-np.arange(COUNT) / COUNT)
POSITIONS = jnp.arange(4)[None]


def scaled(values, positions=POSITIONS):
    scaling = RopeScaling.of(values)
    return np.asarray(scaling.scale(jnp.asarray(FREQUENCIES, jnp.float32), THETA, positions))


def yarn(factor, fast, slow, *, truncate):
    """Frequencies that turn more than `fast` times stay; below `slow` they are divided."""
    ends = [COUNT * math.log(LENGTH / (2 * math.pi * n), THETA) for n in (fast, slow)]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    first, last = max(first, 0), min(last, 2 * COUNT - 1)
    shares = [min(max((i - first) / (last - first), 0), 1) for i in range(COUNT)]
    return [f / factor * s + f * (1 - s) for f, s in zip(FREQUENCIES, shares, strict=True)]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}


@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize("turns", [(32.0, 1.0), (6.0, 0.5)])
def test_yarn_interpolates_between_two_numbers_of_turns(turns, truncate):
    values = {**YARN, "truncate": truncate}
    if turns != (32.0, 1.0):  # the usual ones
        values |= dict(zip(("beta_fast", "beta_slow"), turns, strict=True))
    want = yarn(4.0, *turns, truncate=truncate is not False)
    np.testing.assert_allclose(scaled(values), want, rtol=1e-5)


def test_llama3_interpolates_between_two_wavelengths():
    values = {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": LENGTH},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    want = []
    for f in FREQUENCIES:
        share = (LENGTH / (2 * math.pi / f) - 1.0) / (4.0 - 1.0)
        share = min(max(share, 0), 1)
        want.append((1 - share) * f / 8 + share * f)
    np.testing.assert_allclose(scaled(values), want, rtol=1e-5)
    assert scaled(values)[0] == pytest.approx(FREQUENCIES[0])
    assert scaled(values)[-1] == pytest.approx(FREQUENCIES[-1] / 8)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i for i in range(COUNT)],
    "long_factor": [2.0 + i for i in range(COUNT)],
    "original_max_position_embeddings": LENGTH,
}


def test_longrope_takes_the_long_factors_in_rows_beyond_the_first_length():
    positions = jnp.array([[0, LENGTH - 1], [0, LENGTH]])
    short, long = (FREQUENCIES / np.array(LONG[f"{x}_factor"]) for x in ("short", "long"))
    np.testing.assert_allclose(scaled(LONG, positions)[:, 0], [short, long], rtol=1e-5)
    with pytest.raises(ValueError, match="2 numbers in short_factor, and there are 8 frequencies"):
        scaled({**LONG, "short_factor": [1.0, 2.0]})


@pytest.mark.parametrize(
    ("values", "amplitude"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1.0),
        (YARN, 0.1 * math.log(4) + 1),
        ({**YARN, "attention_factor": 0.7}, 0.7),
        (
            {**YARN, "mscale": 0.7, "mscale_all_dim": 2.0},
            (0.07 * math.log(4) + 1) / (0.2 * math.log(4) + 1),
        ),
        (LONG, 1.0),
        ({**LONG, "factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(LENGTH))),
        ({**LONG, "factor": 4.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_what_cos_and_sin_are_multiplied_with(values, amplitude):
    assert RopeScaling.of(values).amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("values", [{**YARN, "truncate": False, "beta_fast": 6.0}, LONG])
def test_what_is_written_is_read_again(values):
    assert RopeScaling.of(values).to_config() == values
