"""Finds the costs of layers: compiles each alone, forward and backward, to analyse or time it."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.mesh.machines import Machines
from zeroxla.mesh.processes.exchange import exchange
from zeroxla.pipeline.layer_cost import LayerCost, Machine
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.pipeline.stage import Stage
from zeroxla.program.trace import is_float

_REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Asks for a partition that balances the time of the stages.

    Attributes:
      machine: the device whose figures turn the FLOPs and bytes of compiled layers into times. None
        takes the local device.
      measure: run every layer on the local device and take its time instead.
    """

    machine: Machine | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if self.measure and self.machine is not None:
            raise ValueError(
                "Profile(machine=..., measure=True): measured times need no machine; leave out one"
            )

    def machine_here(self) -> Machine:
        """Return the machine to compute times for: the given one, or the local device.

        Raises:
          ValueError: no machine was given, and the local device's figures are not known.
        """
        if self.machine is not None:
            return self.machine
        kind = jax.local_devices()[0].device_kind
        if (known := Machines.load().of_kind(kind)) is not None:
            rate = max(known.flops_per_s.values())
            return Machine(flops_per_s=rate, bytes_per_s=known.bytes_per_s)
        raise ValueError(
            f"the figures of a {kind!r} are not known; give partition=Profile(machine=Machine("
            "flops_per_s=..., bytes_per_s=...)) or Profile(measure=True)"
        )


def profile(
    layers: Sequence[LayerCost],
    cut: Callable[[ModelShapes], Sequence[Stage]],
    shapes: ModelShapes,
    how: Profile,
) -> list[LayerCost]:
    """Find out the costs of layers. All processes get the figures that the first one found.

    Args:
      layers: the model's layers.
      cut: makes a stage of each layer.
      shapes: the shapes to cut the model for.
      how: which costs to find out.

    Returns:
      The layers, with `flops` and `bytes`, or with `seconds`.

    Cost: the compilation of every layer whose program differs from the earlier ones.
    """
    plain = shapes.plain
    # A thread of its own knows nothing of a trace that is going on here, nor of its mesh.
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: _costs(cut(plain), plain, how)).result()
    found = json.loads(exchange("costs of layers", json.dumps(found))[0])
    return [dataclasses.replace(layer, **cost) for layer, cost in zip(layers, found, strict=True)]


def _costs(stages: Sequence[Stage], shapes: ModelShapes, how: Profile) -> list[dict[str, float]]:
    leaves, state = jax.tree.leaves(shapes.params), jax.tree.leaves(shapes.model_state)
    data = shapes.batch, shapes.key, state
    known: dict[str, dict[str, float]] = {}  # by program, so that equal blocks are compiled once
    found = []
    x = None
    for stage in stages:
        mine = [
            jax.ShapeDtypeStruct(piece.shape(leaf.shape), leaf.dtype)
            for piece, leaf in ((piece, leaves[piece.leaves[0]]) for piece in stage.pieces)
        ]
        lowered = jax.jit(_gradients(stage)).lower(mine, x, *data)
        text = lowered.as_text()
        if text not in known:
            known[text] = _cost(lowered.compile(), (mine, x, *data), how)
        found.append(known[text])
        x, _ = jax.eval_shape(stage.run, mine, x, *data)
    return found


def _gradients(stage: Stage) -> Callable[..., Any]:
    """Return the function that runs a stage forward and backward."""

    def run(leaves: list[jax.Array], x: Any, batch: Any, key: jax.Array, state: Any) -> Any:
        def floats(leaves: list[jax.Array], x: Any) -> list[jax.Array]:
            y, _ = stage.run(leaves, x, batch, key, state)
            outputs = [y[0]] if stage.is_last else jax.tree.leaves(y)
            return [a for a in outputs if is_float(a.dtype)]

        y, pull = jax.vjp(floats, leaves, x)
        grads = jax.tree.leaves(pull([jnp.ones_like(a) for a in y]))
        return [y, [g for g in grads if is_float(g.dtype)]]

    return run


def _cost(compiled: Any, shapes: Any, how: Profile) -> dict[str, float]:
    """Return the compiler's counts for a program, or the time of its fastest run."""
    if not how.measure:
        costs = compiled.cost_analysis()
        return {"flops": costs.get("flops", 0.0), "bytes": costs.get("bytes accessed", 0.0)}
    call = functools.partial(compiled, *jax.tree.map(_example, shapes))
    jax.block_until_ready(call())
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds)}


def _example(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(x.shape, x.dtype)
