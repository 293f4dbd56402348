"""One row of the equality matrix: a case on a mesh with settings, against the reference."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

import zeroxla
from tools.reference import Reference, relative_errors, remember_gradients, worst
from tools.zoo import CASES, Case
from zeroxla.frontend import adapt

MESHES = ((1, 8), (2, 4), (4, 2), (8, 1), (3, 2), (1, 1))
NUM_STEPS = 20
HOPS = ("pass", "microbatch", "step")
HUGE = 10**9
KEY = 0

# Bounds on |difference| / max(|leaf|, 1e-3 |all leaves|).
GRADIENT_TOLERANCE = 5e-6
STEPS_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of the configuration that a row varies.

    Attributes:
      persistence: the persistence threshold. None means the default, under which a small model
        stays whole.
      small_units: whether units are as small as the case says; otherwise they have the default
        size.
      prefetch: whether gathers may run far ahead.
      keep: whether gathered leaves are kept for every later use.
      alone: whether every shard travels by itself, as large ones do, instead of fused with others.
      accumulate: number of micro-batches.
      hops: how often leaves and gradients pass the hop over `node`: in every pass ("pass"), once in
        a micro-batch, or once in a step. The latter two keep secondary shards.
    """

    persistence: int | None = 0
    small_units: bool = True
    prefetch: bool = False
    keep: bool = False
    alone: bool = False
    accumulate: int = 1
    hops: str = "pass"

    def config(self, case: Case, mesh: tuple[int, int]) -> zeroxla.ZeroConfig:
        options: dict[str, Any] = {"frozen": case.frozen, "accumulate": self.accumulate}
        if self.persistence is not None:
            options["persistence_threshold"] = self.persistence
        if self.small_units:
            options["unit_elements"] = case.unit_elements
        if self.prefetch:
            options["prefetch_bucket"] = HUGE
        if self.keep:
            options.update(max_live_parameters=HUGE, max_reuse_distance=HUGE)
        # Elsewhere a secondary shard would be the shard itself, or the leaf.
        if self.hops != "pass" and min(mesh) > 1:
            options.update(
                hpz_size="node", inter_node_gather=self.hops, inter_node_reduce=self.hops
            )
        return zeroxla.ZeroConfig(**options)

    def __str__(self) -> str:
        persistence = "default" if self.persistence is None else self.persistence
        words = [f"persist-{persistence}"]
        words += [n for n in ("small_units", "prefetch", "keep", "alone") if getattr(self, n)]
        return ",".join([*words, f"accumulate-{self.accumulate}", f"hops-{self.hops}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A case on a mesh with settings.

    Attributes:
      case: its name in the zoo.
      mesh: the lengths of the axes `node` and `device`.
      settings: the settings.
      axes: the axes that split the work on one row, with their lengths.
    """

    case: str
    mesh: tuple[int, int]
    settings: Settings
    axes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        axes = "".join(f"x{name}{length}" for name, length in self.axes)
        return f"{self.case}-{self.mesh[0]}x{self.mesh[1]}{axes}-{self.settings}"


TWICE = [case for case in CASES if not CASES[case].heavy][::3]
"""The cases that have two rows in the cover."""


def cover() -> Iterator[Row]:
    """Yield a row for each case, and a second row for the cases of `TWICE`.

    Over all rows every pair of a mesh and a setting occurs, and every pair of two settings
    (`test_the_cover_meets_every_pair`). In a first row nothing is persistent and the units are
    small. A second row takes the other value of prefetch, keep, alone and accumulate. Its mesh and
    its other settings are the ones that bring most pairs not met yet.
    """
    met: set[Any] = set()
    for i, case in enumerate(CASES):
        prefetch, keep, alone, accumulate = i % 2 > 0, i % 4 > 1, i % 8 > 3, 1 + i % 3 % 2
        hops = HOPS[(i + i // 6) % 3]
        first = Settings(
            prefetch=prefetch, keep=keep, alone=alone, accumulate=accumulate, hops=hops
        )
        rows = [Row(case=case, mesh=MESHES[i % 6], settings=first)]
        others = [
            Row(
                case=case,
                mesh=mesh,
                settings=Settings(
                    persistence=persistence,
                    small_units=small_units,
                    prefetch=not prefetch,
                    keep=not keep,
                    alone=not alone,
                    accumulate=3 - accumulate,
                    hops=other,
                ),
            )
            for mesh in (*MESHES[i % 6 + 1 :], *MESHES[: i % 6])
            for persistence in (40, 0, None)
            for small_units in (False, True)
            for other in HOPS
            if other != hops
        ]
        met |= pairs(rows[0])
        if case in TWICE:
            rows.append(max(others, key=lambda row: len(pairs(row) - met)))
            met |= pairs(rows[1])
        yield from rows


def pairs(row: Row) -> set[tuple[Any, Any]]:
    """Return the pairs of ("name", value) of mesh and settings that a row meets."""
    values = {"mesh": row.mesh, **dataclasses.asdict(row.settings)}
    return set(itertools.combinations(values.items(), 2))


def matrix() -> Iterator[Row]:
    """Yield every case on every mesh, plainly and with every knob turned. Where secondary shards
    differ from shards, yield it also with each way to keep them."""
    turned = Settings(persistence=40, prefetch=True, keep=True, alone=True, accumulate=2)
    for case in CASES:
        for mesh in MESHES:
            yield Row(case=case, mesh=mesh, settings=Settings())
            yield Row(case=case, mesh=mesh, settings=turned)
            if min(mesh) > 1:
                for hops in HOPS[1:]:
                    yield Row(case=case, mesh=mesh, settings=Settings(accumulate=2, hops=hops))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Differences from the reference; where leaves are compared, (worst leaf, its relative error).

    Attributes:
      loss: relative error of the first step's loss.
      gradient: the worst leaf of the first step's gradient.
      norm: relative error of the first step's metrics["grad_norm"].
      metrics: largest relative error of the model's own metrics in the first step.
      params, model_state: the worst leaf after all steps.
    """

    loss: float
    gradient: tuple[str, float]
    norm: float
    metrics: float
    params: tuple[str, float]
    model_state: tuple[str, float]


def measure(row: Row) -> Errors:
    """Train a row's case for NUM_STEPS and compare with the reference."""
    case, settings = CASES[row.case], row.settings
    world = row.mesh[0] * row.mesh[1]
    parts = dict(row.axes).get("expert", 1) if case.rounds else 1
    expected = _expected(row.case, world, settings.accumulate, parts)
    devices = row.mesh[1] * math.prod(length for _, length in row.axes)
    mesh = zeroxla.make_mesh(nodes=row.mesh[0], devices_per_node=devices, **dict(row.axes))
    step = zeroxla.make_step(
        case.make(), mesh, optimizer(), loss=case.loss, config=settings.config(case, row.mesh)
    )
    if settings.alone:
        step = zeroxla.Step(
            adapted=step.adapted,
            mesh=mesh,
            optimizer=step.optimizer,
            config=step.config,
            alone_elements=0,
        )
    batch = case.batch(case.rows * world * settings.accumulate)
    with warnings.catch_warnings():
        # Where all leaves are kept, nothing is gathered from secondary shards.
        warnings.filterwarnings("ignore", message="hpz_size without effect: with max_live_par")
        state = step.init(jax.random.key(KEY), batch)
    check_init(zeroxla.full_params(state), expected["init"])
    state, metrics = step(state, batch)
    found = jax.tree.leaves(state.opt_state[0])
    gradients = [np.asarray(g)[tuple(map(slice, w.shape))] for g, w in zip(
        found, jax.tree.leaves(expected["gradients"]), strict=True
    )]  # fmt: skip
    first = dict(metrics)
    for _ in range(NUM_STEPS - 1):
        state, metrics = step(state, batch)
    assert int(state.step) == NUM_STEPS
    assert int(metrics["skipped"]) == 0
    return Errors(
        loss=relative(first["loss"], expected["loss"]),
        gradient=worst(relative_errors(gradients, expected["gradients"])),
        norm=relative(first["grad_norm"], expected["norm"]),
        metrics=max(
            (relative(first[name], want) for name, want in expected["metrics"].items()), default=0.0
        ),
        params=worst(relative_errors(zeroxla.full_params(state), expected["params"])),
        model_state=worst(relative_errors(state.model_state, expected["model_state"])),
    )


def optimizer() -> optax.GradientTransformation:
    """AdamW whose state also holds the last gradients, so that one program shows both."""
    return optax.chain(remember_gradients(), optax.adamw(1e-3, eps=1e-3))


@functools.lru_cache(maxsize=6)
def _expected(name: str, world: int, accumulate: int, parts: int = 1) -> dict[str, Any]:
    """Return the results of the reference, as NumPy arrays. It has so many slices a device."""
    case = CASES[name]
    batch = case.batch(case.rows * world * accumulate)
    if case.whole_batch:
        # The first micro-batch is that of all devices together.
        sizes = (world, accumulate, case.rows)
        batch = jax.tree.map(
            lambda x: x.reshape(*sizes, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape), batch
        )
        world = 1
    adapted = adapt(case.reference_model(), case.loss)
    reference = Reference(
        init=adapted.init,
        loss=adapted.loss,
        world=world * parts,
        accumulate=accumulate,
        is_frozen=Settings().config(case, (1, 1)).is_frozen,
    )
    init, model_state, key = reference.start(jax.random.key(KEY), batch)
    params, opt_state = init, optimizer().init(reference.masked(init))
    update = reference.step(optimizer())
    first = None
    for i in range(NUM_STEPS):
        params, opt_state, model_state, results = update(
            params, opt_state, model_state, key, i, batch
        )
        first = results if first is None else first
    loss, metrics, gradients = first
    gradients = reference.masked(gradients)
    return jax.tree.map(
        np.asarray,
        {
            "init": init,
            "loss": loss,
            "metrics": metrics,
            "gradients": gradients,
            "norm": np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients))),
            "params": params,
            "model_state": model_state,
        },
    )


def check_init(found: Any, expected: Any) -> None:
    """Assert that the leaves are those of one device.

    The random bits are the same, but values made of them may be rounded differently. XLA rounds the
    logarithm of a vector otherwise than the logarithm of a loop's remainder, and a shard of a few
    elements is all remainder. XLA also maps bits to a range by a multiply and an add, which it may
    fuse into one rounding. That differs by half an ulp of the range's end, which is thousands of
    ulps of a value near zero. So the bound is four ulps of the leaf's largest element.
    """
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.abs(want).max(initial=0)
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-22 * largest)


def relative(found: Any, expected: Any) -> float:
    """Return |found - expected| / |expected|; infinity for a NaN."""
    difference = abs(float(found) - float(expected))
    return float("inf") if np.isnan(difference) else difference / max(abs(float(expected)), 1e-12)
