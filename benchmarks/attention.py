"""Memory and time of attention in blocks and of the loss in chunks, beside all scores at once.

Temporaries of the loss and its gradient of a GPT of 8 heads, batch 1, as the compiler says: they
grow with the length, not with its square. And the time of causal attention alone, forward and
backward, relative to attention with all scores at once; both take turns.

    python benchmarks/attention.py

Exits with 1 if a target is missed; writes results/attention.json and results/attention.md. Takes 3
minutes on 2 cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Check, alternately, report, table

from zeroxla.models import GPT
from zeroxla.models.attention import dense_attention
from zeroxla.models.blockwise import blockwise_attention

SHORT, LONG = 1024, 4096
LAYERS, WIDTH, HEADS = 2, 256, 8
MODELS: dict[str, dict[str, Any]] = {
    "scanned": {},
    "unrolled": {"scan": False},
    "scanned, remat": {"remat": True},
    "all at once": {"attention_block": LONG, "loss_chunk": 0},
}
MOST = 1.15  # temporaries at LONG over LONG / SHORT times those at SHORT
LENGTHS, TURNS, BLOCK = (1024, 2048), 5, 512


def temporaries(length: int, **options: Any) -> int:
    """Return the bytes of temporaries of a GPT's loss and gradient."""
    model = GPT(vocab=256, length=length, layers=LAYERS, width=WIDTH, heads=HEADS, **options)
    batch = {"tokens": jax.ShapeDtypeStruct((1, length + 1), jnp.int32)}

    def init(batch: Any) -> Any:
        return model.init({"params": jax.random.key(0)}, batch, train=False, method="loss")

    def loss(variables: Any, batch: Any) -> jax.Array:
        return model.apply(variables, batch, train=False, method="loss")[0]

    lowered = jax.jit(jax.value_and_grad(loss)).lower(jax.eval_shape(init, batch), batch)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def times(length: int) -> dict[str, float]:
    """Return the median seconds of each attention's value and gradients."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, length, HEADS, 1, 32)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(1, length, HEADS, 32)), jnp.float32) for _ in "kv")

    def run(attention: Callable[..., jax.Array]) -> Callable[[], float]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, k, v) ** 2)

        step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

        def timed() -> float:
            start = time.perf_counter()
            jax.block_until_ready(step(q, k, v))
            return time.perf_counter() - start

        return timed

    found = alternately(
        {
            "in blocks": run(lambda q, k, v: blockwise_attention(q, k, v, None, 0, None, BLOCK)),
            "at once": run(lambda q, k, v: dense_attention(q, k, v, None, 0, None)),
        },
        TURNS,
    )
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> int:
    """Measure, print, write."""
    rows, checks, figures = [], [], {}
    for name, options in MODELS.items():
        short, long = (temporaries(length, **options) for length in (SHORT, LONG))
        growth = long / short / (LONG // SHORT)
        figures[name] = {"short": short, "long": long}
        rows.append([name, f"{short / 1e6:.0f}", f"{long / 1e6:.0f}", f"{growth:.2f}"])
        if name != "all at once":
            label = f"{name}: temporaries at {LONG} over {LONG // SHORT} times those at {SHORT}"
            checks.append(Check(name=label, value=growth, limit=MOST))
    memory = table(["GPT", f"{SHORT} positions, MB", f"{LONG}, MB", "growth"], rows)
    measured = {length: times(length) for length in LENGTHS}
    speed = table(
        ["positions", "in blocks over at once"],
        [[n, f"{t['in blocks'] / t['at once']:.2f}"] for n, t in measured.items()],
    )
    body = (
        f"GPT of {LAYERS} layers, width {WIDTH}, {HEADS} heads, 256 tokens, batch 1, float32: "
        "temporaries of the loss and its gradient. Growth: memory grew by so many times the factor "
        "by which the length grew.\n\n"
        f"{memory}\n\nTime of causal attention, {HEADS} heads of 32, blocks of {BLOCK}, value and "
        f"gradients, median of {TURNS} turns:\n\n{speed}"
    )
    return report(
        "attention", "Attention in blocks", body, {"memory": figures, "seconds": measured}, checks
    )


if __name__ == "__main__":
    sys.exit(main())
