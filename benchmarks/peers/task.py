"""What every row trains: a byte-level GPT, on random bytes, on 2 hosts of 2 ranks.

Stdlib only: the programs of both frameworks, and what starts them, read it.
"""

from __future__ import annotations

import random

HOSTS = 2
RANKS_PER_HOST = 2
WORLD = HOSTS * RANKS_PER_HOST

VOCAB, LENGTH, LAYERS, WIDTH, HEADS = 256, 128, 6, 384, 6
SEQUENCES = 2
"""In the batch of a rank."""

EVERY = 100
"""Steps between two exchanges, in rows whose hosts do not send in every step."""

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-4
"""As optax.adamw has it; its betas and epsilon are torch's."""


def num_parameters() -> int:
    """Return the number of parameters of the model: 10.8 million."""
    block = 12 * WIDTH**2 + 13 * WIDTH
    return (VOCAB + LENGTH) * WIDTH + LAYERS * block + 2 * WIDTH


def tokens(rank: int, step: int) -> bytes:
    """Return a rank's batch in a step: SEQUENCES rows of LENGTH + 1 bytes."""
    return random.Random(f"{rank} {step}").randbytes(SEQUENCES * (LENGTH + 1))
