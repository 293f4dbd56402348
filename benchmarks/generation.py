"""Generation from the training state: speed, cost per token along the context, memory, resharding.

8 simulated devices, 2 nodes of 4, tensor=4. Against `HybridEngine.generate` stands what there is
without it: the likeliest next token read from a forward pass of the ZeRO-3 step itself
(`step.eval` with a loss that reports tokens), which gathers every layer for every token. Both draw
the same tokens, in turns, in one process. Simulated devices share the cores: ratios carry over.

    python benchmarks/generation.py [--turns 3]

Exits with 1 if a target is missed; writes results/generation.json and results/generation.md. Takes
about 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import NUM_DEVICES, Check, report, start, table

import zeroxla
from zeroxla.hybrid.prompts import LengthLimits
from zeroxla.inspect import format_bytes, memory
from zeroxla.models import GPT

LAYERS, WIDTH, HEADS, CONTEXT, TENSOR = 8, 384, 8, 1024, 4
ROWS, PROMPT, NEW = NUM_DEVICES, 64, 64
EARLY, LATE, SPAN = 64, 512, 128  # the two places along the context, and tokens timed from each


@dataclasses.dataclass(frozen=True, slots=True)
class OneBucket(LengthLimits):
    """Compiles for the whole context, so that every call runs one program with one cache."""

    def buckets(self, prompt: int, new: int) -> tuple[int, int]:
        return PROMPT + 1, self.max_length - PROMPT - 1


def report_next(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> Any:
    """A loss whose metrics are the likeliest next token of each row of the whole batch."""
    (row,) = batch["tokens"]
    logits = apply(row[None], train=train)[0, batch["last"][0]]
    token = jnp.argmax(logits).astype(jnp.float32)
    # Metrics are means over the devices, each of which has one row.
    metrics = {f"row{i}": jnp.where(batch["row"][0] == i, token * ROWS, 0.0) for i in range(ROWS)}
    return logits.mean(), metrics


def with_step(step: zeroxla.Step, state: zeroxla.TrainState, prompts: np.ndarray) -> np.ndarray:
    """Continue prompts greedily by forward passes of a step."""
    tokens = np.zeros((ROWS, PROMPT + NEW), np.int32)
    tokens[:, :PROMPT] = prompts
    for i in range(PROMPT, PROMPT + NEW):
        last = np.full(ROWS, i - 1, np.int32)
        batch = {"tokens": tokens, "last": last, "row": np.arange(ROWS, dtype=np.int32)}
        metrics = jax.device_get(step.eval(state, batch))
        tokens[:, i] = [round(float(metrics[f"row{r}"])) for r in range(ROWS)]
    return tokens[:, PROMPT:]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of one device while it generates: what it holds, and what it must."""

    parameters: int
    must: int
    holds: int

    @property
    def over(self) -> float:
        return self.holds / self.must

    def row(self) -> list[str]:
        numbers = [f"{self.parameters:,}", format_bytes(self.must), format_bytes(self.holds)]
        return [*numbers, f"{self.over:.3f}"]


def held(engine: zeroxla.HybridEngine, model: GPT) -> Held:
    """Ask the compiler what generating takes."""
    lowered = engine.lower(ROWS, PROMPT, max_new_tokens=NEW, temperature=0)
    found = memory(lowered.compile())
    num, rows = engine.plan.num_parameters, ROWS // (NUM_DEVICES // TENSOR)
    cache = 2 * model.layers * rows * (PROMPT + 1 + NEW) * model.width * 4 // TENSOR
    holds = found.argument_bytes + found.temp_bytes
    return Held(parameters=num, must=4 * num // TENSOR + cache, holds=holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="timed calls of each kind")
    turns = parser.parse_args().turns
    mesh = start()
    model = GPT(vocab=256, length=CONTEXT, layers=LAYERS, width=WIDTH, heads=HEADS)
    step = zeroxla.make_step(model, mesh, optax.sgd(1e-3))
    state = step.init(jax.random.key(0), {"tokens": np.zeros((ROWS, 65), np.int32)})
    prompts = np.random.default_rng(0).integers(0, 256, (ROWS, PROMPT), dtype=np.int32)
    engine = zeroxla.HybridEngine(step, tensor=TENSOR)
    asking = zeroxla.make_step(model, mesh, optax.sgd(1e-3), loss=report_next)
    options: dict[str, Any] = {"key": jax.random.key(1), "temperature": 0}

    ratios, ours, theirs, reshards = [], [], [], []
    for turn in range(turns + 1):
        begin = time.perf_counter()
        found = engine.generate(state, prompts, max_new_tokens=NEW, **options)
        middle = time.perf_counter()
        slow = with_step(asking, state, prompts)
        end = time.perf_counter()
        np.testing.assert_array_equal(found.tokens, slow)
        if turn:  # The first one compiles.
            ours.append(middle - begin)
            theirs.append(end - middle)
            reshards.append(found.reshard_s)
            ratios.append((end - middle) / (middle - begin))
    speedup = statistics.median(ratios)

    kept = zeroxla.HybridEngine(step, tensor=TENSOR, release=False)
    kept._buckets = dataclasses.replace(kept._buckets, limits=OneBucket(CONTEXT))

    def seconds(new: int) -> float:
        begin = time.perf_counter()
        kept.generate(state, prompts, max_new_tokens=new, **options)
        return time.perf_counter() - begin

    def per_token(place: int) -> float:
        new = place - PROMPT + SPAN
        return (seconds(new) - seconds(max(new - SPAN, 1))) / SPAN

    seconds(1)
    flat = [(per_token(EARLY), per_token(LATE)) for _ in range(turns)]
    flatness = statistics.median(late / early for early, late in flat)

    num = engine.plan.num_parameters
    large = zeroxla.make_step(GPT.small(), mesh, optax.sgd(1e-3))
    large.abstract_state({"tokens": np.zeros((ROWS, 65), np.int32)})
    memories = [held(engine, model), held(zeroxla.HybridEngine(large, tensor=TENSOR), GPT.small())]
    columns = ("parameters", "model/tensor + cache", "held", "over")
    lines = [
        ["generate, with resharding", f"{statistics.median(ours):.2f}", "1.00"],
        ["forward passes of the step", f"{statistics.median(theirs):.2f}", f"{speedup:.1f}"],
    ]
    body = (
        f"GPT of {LAYERS} layers and width {WIDTH} ({num:,} parameters, float32), {ROWS} prompts "
        f"of {PROMPT} tokens, {NEW} new ones, 2 nodes x 4 simulated devices, tensor={TENSOR}. "
        f"Median of {turns} alternating calls.\n\n"
        f"{table(('64 new tokens', 's', 'over generate'), lines)}\n\n"
        f"Resharding to the tensor-parallel layout: {statistics.median(reshards):.3f} s of it. A "
        f"token at place {LATE} of the context costs {flatness:.2f} times one at {EARLY} (a cache "
        f"of {CONTEXT} places, {SPAN} tokens timed from each).\n\n"
        "While it generates, a device holds, beside the state, by the compiler's plan (nothing of "
        "the larger model is computed):\n\n"
        f"{table(columns, [each.row() for each in memories])}"
        "\n\nWhat is more are the activations of a piece of the prompts, the same for both, and "
        "padding of a vocabulary that does not divide."
    )
    checks = [
        Check(name="generate over forward passes of the step", value=1 / speedup, limit=1 / 8),
        Check(name=f"a token at {LATE} over one at {EARLY}", value=flatness, limit=1.6),
        Check(name="memory over model/tensor + cache, GPT-2", value=memories[-1].over, limit=1.1),
    ]
    figures = {
        "generate_s": ours,
        "step_s": theirs,
        "reshard_s": reshards,
        "speedup": speedup,
        "token_s": flat,
        "flatness": flatness,
        "memory": [dataclasses.asdict(m) for m in memories],
    }
    return report("generation", "Generation from the training state", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
