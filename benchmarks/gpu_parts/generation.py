"""Generation from the training state: greedy tokens against forward passes, tokens a second."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from gpu_parts.findings import Finding, Program, bounded, ratio
from gpu_parts.gpts import Size
from gpu_parts.place import Place, rows_for
from zeroxla import ZeroConfig
from zeroxla.program.compat import mesh_context

LARGE = Size(layers=12, width=768, heads=12, vocab=50304, length=1024, rows=1)
SMALL = Size(layers=2, width=64, heads=4, vocab=128, length=32, rows=1)
ROWS, PROMPT, NEW = 16, 64, 192
SMALL_ROWS, SMALL_PROMPT, SMALL_NEW = 4, 8, 16
TURNS = 5
SHORTFALL = 1e-3
"""The most that the logit of a drawn token may lie below the largest one of a forward pass: greedy
decoding takes the likeliest token, and float32 in another order moves a logit by less."""


def shape_of(place: Place) -> tuple[Size, int, int, int]:
    """Return (the model's size, prompts, tokens of each prompt, new tokens)."""
    if place.small:
        rows = rows_for(place.num_devices, SMALL_ROWS)
        return SMALL, rows, SMALL_PROMPT, SMALL_NEW
    return LARGE, rows_for(place.num_devices, ROWS), PROMPT, NEW


def make(place: Place, dtype: str, **options: Any) -> zeroxla.Step:
    """Return a step of the model in a compute dtype."""
    size, *_ = shape_of(place)
    config = ZeroConfig(compute_dtype=dtype)
    return zeroxla.make_step(size.model(), place.mesh(), optax.sgd(0.1), config=config, **options)


def make_engine(place: Place, step: zeroxla.Step) -> zeroxla.HybridEngine:
    """Return the engine, with as many devices to a copy of the model as divide its heads."""
    size, *_ = shape_of(place)
    with mesh_context(step.mesh):
        return zeroxla.HybridEngine(step, tensor=math.gcd(place.num_devices, size.heads))


def first_batch(place: Place) -> dict[str, np.ndarray]:
    """Return prompts, as a step's batch."""
    size, rows, prompt, _ = shape_of(place)
    tokens = np.random.default_rng(0).integers(0, size.vocab, (rows, prompt), dtype=np.int32)
    return {"tokens": tokens}


def shortfall(logits_BLV: jax.Array, tokens_BL: jax.Array, prompt: int) -> jax.Array:
    """Return how far each row's worst drawn token lies below the likeliest one, float32[B]."""
    logits = logits_BLV[:, prompt - 1 : -1]
    drawn = jnp.take_along_axis(logits, tokens_BL[:, prompt:, None], axis=-1)[..., 0]
    return jnp.max(jnp.max(logits, axis=-1) - drawn, axis=-1)


def report_shortfall(prompt: int, apply: Any, batch: Any, *, train: bool) -> Any:
    """A loss: the mean over rows of their shortfalls."""
    logits = apply(batch["tokens"], train=train)
    return jnp.mean(shortfall(logits, batch["tokens"], prompt)), {}


def measure(place: Place) -> Iterator[Finding]:
    """Draw greedily in float32 and check every token; then time the engine in bfloat16."""
    size, rows, prompt, new = shape_of(place)
    prompts, options = first_batch(place)["tokens"], {"key": jax.random.key(1), "temperature": 0}
    with jax.default_matmul_precision("highest"):
        step = make(place, "float32")
        state = step.init(jax.random.key(0), first_batch(place))
        engine = make_engine(place, step)
        drawn = engine.generate(state, prompts, max_new_tokens=new, **options).tokens
        whole = np.concatenate([prompts, drawn], axis=1)
        loss = functools.partial(report_shortfall, prompt)
        asking = make(place, "float32", loss=loss)
        by_step = asking.eval(state, {"tokens": whole})["loss"]
        variables = {"params": zeroxla.full_params(state)}
        model = size.model()

        def forward(variables: Any, tokens: jax.Array) -> jax.Array:
            logits: Any = model.apply(variables, tokens, train=False)
            return shortfall(logits, tokens, prompt)

        plain = jax.jit(forward)(variables, jnp.asarray(whole))
    name = "largest logit minus the greedy token's logit"
    yield bounded(
        f"{name}, forward of the training step, mean over rows", float(by_step), SHORTFALL
    )
    yield bounded(f"{name}, plain jit of the model, worst row", float(jnp.max(plain)), SHORTFALL)
    rates, seconds = {}, {}
    for dtype in ("float32", "bfloat16"):
        step = make(place, dtype)
        state = step.init(jax.random.key(0), first_batch(place))
        engine = make_engine(place, step)
        found = [
            engine.generate(state, prompts, max_new_tokens=new, **options)
            for _ in range(2 if place.small else TURNS + 1)
        ][1:]
        seconds[dtype] = statistics.median(x.generate_s for x in found)
        rates[dtype] = rows * new / seconds[dtype]
        reshard_s = statistics.median(x.reshard_s for x in found)
        text = f"{rates[dtype]:,.0f} tokens/s, and {1e3 * reshard_s:.1f} ms to reshard"
        name = f"{rows} prompts of {prompt} tokens, {new} new ones, greedily, {dtype}"
        yield Finding(name=name, text=text, value=rates[dtype])
    yield ratio("time to generate, bfloat16 over float32", seconds["bfloat16"] / seconds["float32"])


def programs(place: Place) -> Iterator[Program]:
    """Yield the engine's program in both dtypes, and the step that checks its tokens."""
    _, rows, prompt, new = shape_of(place)

    def lower(dtype: str) -> jax.stages.Lowered:
        step = make(place, dtype)
        step.abstract_state(first_batch(place))
        with place.lowering(), mesh_context(step.mesh):
            engine = make_engine(place, step)
            return engine.lower(rows, prompt, max_new_tokens=new, temperature=0)

    def lower_check() -> jax.stages.Lowered:
        step = make(place, "float32", loss=functools.partial(report_shortfall, prompt))
        batch = {"tokens": jax.ShapeDtypeStruct((rows, prompt + new), jnp.int32)}
        with place.lowering():
            return step.lower(step.abstract_state(batch), batch)

    for dtype in ("float32", "bfloat16"):
        yield Program(name=f"greedy generation, {dtype}", lower=functools.partial(lower, dtype))
    yield Program(name="a step with the check as its loss", lower=lower_check)
