"""`search_budget`: tries programs that keep less and less, until one fits a memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.plan_keeper import PlanKeeper
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.step.memory.fit_report import MemoryFit, Try
from zeroxla.step.programs import Programs

MAX_TRIES = 7
SAFETY = 0.03
"""For each try that missed, the next one aims this share of the activations lower."""
WORTH = 0.01
"""Another program is tried if it computes again by this share less than the best that fits."""

Measure = Callable[[Programs, ActivationBudget], tuple[int, int]]
"""Traces the programs; returns the bytes that a device holds, and the temporaries among them."""


def search_budget(
    programs: Programs, total: int, rates: DeviceRates, measure: Measure
) -> tuple[MemoryFit, Programs]:
    """Find what a step keeps so that it fits.

    Args:
      programs: the functions of a step.
      total: the bytes that it may take.
      rates: what computing again and moving costs.
      measure: says what programs take.

    Returns:
      What was tried; and the programs of the best try, or of the smallest one if none fits.
    """
    tries: list[Try] = []
    made: list[Programs] = []
    wanted: dict[str, Any] = {}
    finder = PlaceFinder(rates)
    may_reuse = programs.config.may_reuse_leaves
    while True:
        budget = ActivationBudget(finder=finder, may_reuse=may_reuse, **wanted)
        made.append(dataclasses.replace(programs, activations=budget))
        num_bytes, temp_bytes = measure(made[-1], budget)
        keeping = budget.newest
        tried = Try(
            keeping=keeping,
            num_bytes=num_bytes,
            temp_bytes=temp_bytes,
            seconds=0.0,
            plan=budget.only,
        )
        tries.append(tried)
        if num_bytes <= total and len(tries) == 1 and not may_reuse:
            break
        keeper = keeper_of(programs, budget)
        seconds = (keeping or keeper.everything()).seconds
        tries[-1] = dataclasses.replace(tried, seconds=seconds)
        found = _next_try(tries, total, keeper)
        if found is None and may_reuse:
            found = _with_reuse(tries, total, keeper)
        if found is None:
            break
        wanted = found
    fit = MemoryFit(total_bytes=total, tries=tuple(tries))
    return fit, made[tries.index(fit.chosen)]


def keeper_of(programs: Programs, budget: ActivationBudget) -> PlanKeeper:
    """Return what chooses for the loss that was traced last under a budget."""
    # A segment may name the mesh's axes.
    return programs.in_mesh(lambda _: budget.keeper, jax.ShapeDtypeStruct((), jnp.int32))


def _next_try(tries: list[Try], total: int, keeper: PlanKeeper) -> dict[str, Any] | None:
    """Return the fields of the `ActivationBudget` to try next; None if nothing is left to try.

    What is measured and the keeper's own figure differ by what the keeper does not see: gathered
    leaves, gradients, what one segment computes. That difference hardly changes with the choice.
    """
    newest = tries[-1]
    if newest.keeping and newest.keeping.reused.elements:
        return None
    by_keeper = (newest.keeping or keeper.everything()).num_bytes
    limit = total - (newest.num_bytes - by_keeper)
    best_s = min((t.own_seconds for t in tries if t.num_bytes <= total), default=math.inf)
    left = MAX_TRIES - len(tries)
    leasts = keeper.leasts()
    # Nothing is refused before all plans were tried with the least that can be kept of them.
    order = sorted(range(len(leasts)), key=lambda i: leasts[i].num_bytes)
    untried = [i for i in order if _known(tries, leasts[i]) is None]
    asked = {t.plan for t in tries}
    untried += [i for i in range(keeper.usual, len(keeper.plans)) if i not in asked]
    if math.isinf(best_s):
        limit -= SAFETY * max(limit, 0.0) * (len(tries) - 1)
    last_resort = {"limit": 0.0, "only": untried[0]} if math.isinf(best_s) and untried else None
    if left <= (len(untried) if last_resort else 0):
        return last_resort if left else None
    # Where only the last plan fits, it is the one to refine.
    only = newest.plan if (newest.plan or 0) >= keeper.usual else None
    for _ in range(MAX_TRIES):
        choice = keeper.within(limit, only)
        known = _known(tries, choice)
        if known is None:
            is_worth = choice.own_seconds < best_s * (1 - WORTH)
            return {"limit": limit, "only": only} if is_worth else None
        if known.num_bytes <= total or any(map(choice.is_as, leasts)):
            break
        limit = choice.num_bytes * (1 - WORTH)
    return last_resort


def _with_reuse(tries: list[Try], total: int, keeper: PlanKeeper) -> dict[str, Any] | None:
    """Return the same for leaves that stay gathered, once something fits without."""
    best = min((t for t in tries if t.num_bytes <= total), key=lambda t: t.seconds, default=None)
    if best is None or len(tries) == MAX_TRIES:
        return None
    # The last try with such leaves says best what the keeper does not see.
    with_reuse = [t for t in tries if t.keeping and t.keeping.reused.elements]
    seen = with_reuse[-1] if with_reuse else best
    limit = total - (seen.num_bytes - (seen.keeping or keeper.everything()).num_bytes)
    limit -= SAFETY * max(limit, 0.0) * len(with_reuse)
    choice = keeper.within(limit, reuse=True)
    is_worth = choice.seconds < best.seconds * (1 - WORTH) and _known(tries, choice) is None
    return {"limit": limit, "reuse": True} if is_worth else None


def _known(tries: list[Try], choice: Keeping) -> Try | None:
    """Return the try that had the same choice; None if there is none."""
    return next((t for t in tries if t.keeping is not None and t.keeping.is_as(choice)), None)
