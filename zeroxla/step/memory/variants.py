"""`fit_variants`: decides the options that a memory budget is left, and finds what a step keeps.

Each value of such options makes a variant of the step's programs. A variant's seconds are foretold
from one trace; the compiler sees the best ones alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zeroxla.config.undecided import AUTO, decided, undecided
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.link_seconds import traffic_seconds
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.mesh.axes import NODE, world_size
from zeroxla.step.memory.budget_search import Measure, keeper_of, search_budget
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.programs import Programs

MOST_SEARCHES = 3
"""The most variants that are searched before the budget counts as too small."""

Rates = Callable[[ZeroConfig], DeviceRates]
"""Returns what computing again and moving costs under a config."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Foretold:
    """What a trace says of a variant; in the order in which variants are searched.

    Attributes:
      misses: the bytes by which the variant does not fit.
      seconds: the seconds that it adds to a step, by the cost model.
      accumulate: the number of its micro-batches.
      place: its place among the variants.
    """

    misses: float
    seconds: float
    accumulate: int
    place: int


def fit_variants(
    programs: Programs, batch: Any, total: int, rates: Rates, measure: Measure, live: Measure
) -> tuple[MemoryFit, Programs]:
    """Find the options that are undecided, and what a step keeps so that it fits.

    Args:
      programs: the functions of a step.
      batch: the global batch, or its shapes.
      total: the bytes that it may take.
      rates: what computing again and moving costs.
      measure: says what programs take.
      live: says it by the live ranges of their trace.

    Returns:
      What was tried; and the programs of the best try, or of the smallest one if none fits.
    """
    names = undecided(programs.asked)
    variants = [programs]
    if names or len(_prefetch_buckets(programs)) > 1:
        variants = _in_order(programs, batch, total, rates, live)[:MOST_SEARCHES]
    found: list[tuple[MemoryFit, Programs]] = []
    for variant in variants:
        fit, chosen = search_budget(variant, total, rates(variant.config), measure)
        values = {name: getattr(variant.config, name) for name in names}
        if variant.config.prefetch_bucket != programs.asked.prefetch_bucket:
            values["prefetch_bucket"] = variant.config.prefetch_bucket
        found.append((dataclasses.replace(fit, decided=values), chosen))
        if fit.best is not None:
            return found[-1]
    return min(found, key=lambda pair: pair[0].smallest.num_bytes)


def _in_order(
    programs: Programs, batch: Any, total: int, rates: Rates, live: Measure
) -> list[Programs]:
    """Return the variants, the most promising first."""
    variants: list[Programs] = []
    foretold: list[_Foretold] = []
    for hpz_size in _hpz_sizes(programs):
        enough = False
        for accumulate in _micro_batches(programs, batch):
            config = decided(programs.asked, accumulate=accumulate, hpz_size=hpz_size)
            is_free = False
            for prefetch in _prefetch_buckets(programs):
                if not is_free:
                    config = dataclasses.replace(config, prefetch_bucket=prefetch)
                    variants.append(dataclasses.replace(programs, config=config))
                    found, is_free = _foretell(variants[-1], len(foretold), total, rates, live)
                    foretold.append(found)
            # With more micro-batches there is only more to gather. One larger number is kept in
            # reserve, for the compiler may need more than is foretold.
            if enough:
                break
            enough = is_free
    return [variants[x.place] for x in sorted(foretold)]


def _hpz_sizes(programs: Programs) -> list[Any]:
    """Return the values of `hpz_size` that are tried."""
    if programs.asked.hpz_size != AUTO:
        return [programs.config.hpz_size]
    return [1, "node"] if programs.mesh.shape[NODE] > 1 else [1]


def _prefetch_buckets(programs: Programs) -> list[int | None]:
    """Return the values of `prefetch_bucket` that are tried: gathers run ahead, or they do not."""
    asked = programs.asked.prefetch_bucket
    runs_ahead = asked is None and programs.prefetch_bucket is None
    return [None, 0] if runs_ahead else [asked]


def _micro_batches(programs: Programs, batch: Any) -> list[int]:
    """Return the values of `accumulate` that are tried: all that divide a device's rows."""
    if programs.asked.accumulate != AUTO:
        return [programs.config.num_micro_batches]
    rows = jax.tree.leaves(batch)[0].shape[0] // world_size(programs.mesh)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def _foretell(
    programs: Programs, place: int, total: int, rates: Rates, live: Measure
) -> tuple[_Foretold, bool]:
    """Foretell what a variant takes; and say whether it fits with nothing computed again."""
    config = programs.config
    may_reuse = config.may_reuse_leaves
    budget = ActivationBudget(finder=PlaceFinder(rates(config)), may_reuse=may_reuse)
    num_bytes, _ = live(dataclasses.replace(programs, activations=budget), budget)
    keeper = keeper_of(programs, budget)
    limit = total - (num_bytes - keeper.everything().num_bytes)
    choice = keeper.within(limit, reuse=may_reuse)
    # With "step" each leaf crosses the hosts once for all micro-batches.
    count = config.num_micro_batches
    waits_s = traffic_seconds(
        choice.places,
        choice.reused,
        choice.rates,
        gathers=1 / count if config.inter_node_gather == "step" else 1,
        reduces=1 / count if config.inter_node_reduce == "step" else 1,
    )
    found = _Foretold(
        misses=max(choice.num_bytes - limit, 0.0),
        seconds=count * (choice.own_seconds + waits_s),
        accumulate=count,
        place=place,
    )
    return found, found.misses == 0 and not choice.flops
