"""Causal attention: cuDNN's kernel and the one in blocks against dense attention in float32."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from common import alternately

from gpu_parts.findings import Finding, Program, bounded, largest_error, megabytes, ratio
from gpu_parts.gpts import median_ratio
from gpu_parts.place import Place
from zeroxla.inspect import memory
from zeroxla.models.attention import CUDNN_CAPABILITY, dense_attention
from zeroxla.models.attention import causal_attention as attend

BATCH, LENGTH, HEADS, WIDTH = 2, 2048, 16, 64
SMALL_LENGTH, BLOCK = 256, 512
TURNS, SMALL_TURNS = 11, 3
BOUNDS = {"bfloat16": 0.03, "float32": 0.01}
"""The largest difference of an output or a gradient from dense attention in float32 on the same
numbers, over the largest magnitude. An input of bfloat16 rounds probabilities to 2^-9, and XLA
multiplies float32 on a GPU in TF32, with 2^-11."""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def kinds(place: Place, dtype: str) -> dict[str, Attention]:
    """Return the attentions of a dtype by name; cuDNN's is the one that a GPU takes by itself."""
    block = BLOCK if not place.small else SMALL_LENGTH // 4
    found: dict[str, Attention] = {
        "dense": lambda q, k, v: dense_attention(q, k, v, None, 0, None),
        "blockwise": functools.partial(attend, backend="blockwise", block=block),
    }
    has_cudnn = place.kind != "devices" or place.capability() >= CUDNN_CAPABILITY
    if dtype == "bfloat16" and has_cudnn:
        found["cudnn"] = functools.partial(attend, backend="cudnn")
    return found


def inputs(place: Place) -> list[jax.Array]:
    """Return queries, keys and values in bfloat16, normal numbers."""
    length = SMALL_LENGTH if place.small else LENGTH
    shapes = [(BATCH, length, HEADS, 1, WIDTH), *[(BATCH, length, HEADS, WIDTH)] * 2]
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def with_gradients(attention: Attention) -> Callable[..., Any]:
    """Return the function (q, k, v) -> (output, gradients of a sum of squares of it)."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out = attention(q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, grads

    return jax.jit(run)


def measure(place: Place) -> Iterator[Finding]:
    """Compare and time every attention, in both dtypes."""
    arrays = inputs(place)
    wide = [x.astype(jnp.float32) for x in arrays]
    dense = kinds(place, "float32")["dense"]
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(with_gradients(dense)(*wide))
    for dtype, operands in (("bfloat16", arrays), ("float32", wide)):
        found = {name: with_gradients(f) for name, f in kinds(place, dtype).items()}
        if dtype == "bfloat16" and "cudnn" not in found:
            text = f"not on this device: it needs compute capability {CUDNN_CAPABILITY}"
            yield Finding(name="cudnn", text=text)
        for name, function in found.items():
            error = largest_error(jax.device_get(function(*operands)), expected)
            yield bounded(f"{name}, {dtype}: error of output and gradients", error, BOUNDS[dtype])
        for name, function in found.items():
            compiled = function.lower(*operands).compile()
            label = f"{name}, {dtype}: temporaries, says the compiler"
            yield megabytes(label, memory(compiled).temp_bytes)
        runs = {name: functools.partial(_seconds, f, operands) for name, f in found.items()}
        times = alternately(runs, SMALL_TURNS if place.small else TURNS)
        for name in times:
            if name != "dense":
                label = f"{name}, {dtype}: time of output and gradients over dense attention's"
                yield ratio(label, median_ratio(times, name, "dense"))
        for name, seconds in times.items():
            text = f"{1e3 * statistics.median(seconds):.2f} ms"
            yield Finding(name=f"{name}, {dtype}: output and gradients", text=text)


def _seconds(function: Callable[..., Any], operands: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function(*operands))
    return time.perf_counter() - begin


def programs(place: Place) -> Iterator[Program]:
    """Yield every attention with its gradients."""
    shapes = jax.eval_shape(lambda: inputs(place))
    for dtype in ("bfloat16", "float32"):
        operands = [jax.ShapeDtypeStruct(x.shape, dtype) for x in shapes]
        for name, function in kinds(place, dtype).items():
            lower = functools.partial(place.lower, with_gradients(function), *operands)
            yield Program(name=f"{name}, {dtype}, with gradients", lower=lower)
