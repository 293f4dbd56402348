"""Generation with models that have no cache: the time of a token, early and late in a row.

The engine makes a cache from the trace of a pass over whole rows. Three models of plain flax, which
know nothing of generation: its attention, an LSTM, and gated linear recurrences behind causal
convolutions. Each continues prompts in a cache of 1024 places; a token is timed at place 64 and at
place 512, as the difference of two calls. Against it stands the same engine told to do without: a
pass over all places for each token. 8 simulated devices, 2 nodes of 4, tensor=4.

    python benchmarks/generation_without_cache.py [--turns 3]

Exits with 1 if a target is missed; writes results/generation_without_cache.json and .md. Takes
about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import NUM_DEVICES, Check, report, start, table
from jax import lax

import zeroxla
from zeroxla.hybrid.generate_programs import GeneratePrograms
from zeroxla.hybrid.prompts import LengthLimits

VOCABULARY, WIDTH, CONTEXT, TENSOR = 256, 256, 1024, 4
ROWS, PROMPT = NUM_DEVICES, 32
EARLY, LATE, SPAN = 64, 512, 128  # the two places along the context, and tokens timed from each
WHOLE = 8  # tokens timed without a cache


class Model(nn.Module):
    """Embeds tokens, mixes places, returns logits."""

    length: int = CONTEXT

    def mix(self, x: Any) -> Any:
        raise NotImplementedError

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        return nn.Dense(VOCABULARY)(self.mix(nn.Embed(VOCABULARY, WIDTH)(tokens)))


class Attention(Model):
    """4 blocks of flax's attention, with learned positions."""

    def mix(self, x: Any) -> Any:
        x = x + nn.Embed(self.length, WIDTH)(jnp.arange(x.shape[1]))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        for _ in range(4):
            x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.LayerNorm()(x)


class Lstm(Model):
    """2 layers of flax's LSTM."""

    def mix(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
        return x


class Recurrence(Model):
    """4 gated linear recurrences by `associative_scan`, each behind a causal convolution."""

    def mix(self, x: Any) -> Any:
        for _ in range(4):
            h = nn.Conv(WIDTH, (4,), padding="CAUSAL", feature_group_count=WIDTH)(x)
            keep, new = nn.sigmoid(nn.Dense(WIDTH)(h)), nn.Dense(WIDTH)(h)
            _, h = lax.associative_scan(_after, (keep, (1 - keep) * new), axis=1)
            x = x + nn.Dense(WIDTH)(h * nn.gelu(nn.Dense(WIDTH)(x)))
        return nn.LayerNorm()(x)


def _after(first: Any, second: Any) -> Any:
    return first[0] * second[0], first[1] * second[0] + second[1]


@dataclasses.dataclass(frozen=True, slots=True)
class OneBucket(LengthLimits):
    """Compiles for the whole context, so that every call runs one program with one cache."""

    def buckets(self, prompt: int, new: int) -> tuple[int, int]:
        return PROMPT, self.max_length - PROMPT


def engine_of(step: zeroxla.Step, *, cached: bool) -> zeroxla.HybridEngine:
    """Return an engine with one bucket, with the cache or without."""
    engine = zeroxla.HybridEngine(step, tensor=TENSOR, release=False)
    assert engine._model.calls.has_cache
    engine._buckets = dataclasses.replace(engine._buckets, limits=OneBucket(CONTEXT))
    if not cached:
        calls = dataclasses.replace(engine._model.calls, with_cache=None)
        model = dataclasses.replace(engine._model, calls=calls)
        programs: GeneratePrograms = dataclasses.replace(engine._programs, model=model)
        engine._model = model
        engine._programs = engine._compiled.programs = engine._copy.programs = programs
    return engine


def seconds(engine: zeroxla.HybridEngine, state: Any, prompts: np.ndarray, new: int) -> float:
    """Return the time of a call that draws so many tokens."""
    options = {"key": jax.random.key(1), "temperature": 0}
    begin = time.perf_counter()
    engine.generate(state, prompts, max_new_tokens=new, **options)
    return time.perf_counter() - begin


def measure(model: Model, mesh: Any, turns: int) -> dict[str, Any]:
    """Time one model's tokens; return milliseconds, medians of the turns, and ratios."""
    step = zeroxla.make_step(model, mesh, optax.sgd(1e-3), loss=_loss)
    state = step.init(jax.random.key(0), {"tokens": np.zeros((ROWS, 65), np.int32)})
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, PROMPT), dtype=np.int32)
    with_cache, without = engine_of(step, cached=True), engine_of(step, cached=False)
    for engine in (with_cache, without):
        seconds(engine, state, prompts, 1)  # compiles

    def per_token(place: int) -> float:
        new = place - PROMPT + SPAN
        end = seconds(with_cache, state, prompts, new)
        return (end - seconds(with_cache, state, prompts, new - SPAN)) / SPAN

    early, late, whole = [], [], []
    for _ in range(turns):
        early.append(per_token(EARLY))
        late.append(per_token(LATE))
        first = seconds(without, state, prompts, 1)
        whole.append((seconds(without, state, prompts, 1 + WHOLE) - first) / WHOLE)
    pairs = list(zip(early, late, whole, strict=True))
    return {
        "early_ms": 1e3 * statistics.median(early),
        "late_ms": 1e3 * statistics.median(late),
        "whole_ms": 1e3 * statistics.median(whole),
        "flatness": statistics.median(b / a for a, b, _ in pairs),
        "speedup": statistics.median(c / b for _, b, c in pairs),
    }


def _loss(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> Any:
    logits = apply(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="timed calls of each kind")
    turns = parser.parse_args().turns
    mesh = start()
    models = {"attention": Attention(), "LSTM": Lstm(), "linear recurrence": Recurrence()}
    found = {name: measure(model, mesh, turns) for name, model in models.items()}
    columns = (
        "model", f"at place {EARLY}, ms", f"at place {LATE}, ms", "ratio", "whole pass, ms",
        "whole pass / late",
    )  # fmt: skip
    rows = [
        (
            f"{name}: {(models[name].__doc__ or '').rstrip('.')}",
            *(f"{x[key]:.1f}" for key in ("early_ms", "late_ms")),
            f"{x['flatness']:.2f}",
            f"{x['whole_ms']:.1f}",
            f"{x['speedup']:.1f}",
        )
        for name, x in found.items()
    ]
    body = (
        f"Models of plain flax without a cache, width {WIDTH}, float32; {ROWS} prompts of {PROMPT} "
        f"tokens, 2 nodes x 4 simulated devices, tensor={TENSOR}, {CONTEXT} places. Times of one "
        f"token of all rows, medians of {turns} turns ({SPAN} tokens timed from each place).\n\n"
        f"{table(columns, rows)}\n\n"
        "A whole pass is what each token takes where no cache can be made."
    )
    checks = [
        Check(name=f"{name}: a token at {LATE} over one at {EARLY}", value=x["flatness"], limit=1.6)
        for name, x in found.items()
    ]
    return report(
        "generation_without_cache", "Generation without a cache of the model's", body, found, checks
    )


if __name__ == "__main__":
    sys.exit(main())
