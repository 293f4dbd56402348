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
"""After a choice that missed, the next one of the same plan aims this share lower."""
LEAST_FALL = 1 / 2
"""What is measured is taken to fall by at least this share of what is chosen to fall."""
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
            plan=budget.only or 0,
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
    """Return the fields of the `ActivationBudget` to try next; None if nothing is left to try."""
    if tries[-1].keeping and tries[-1].keeping.reused.elements:
        return None
    best_s = min((t.own_seconds for t in tries if t.num_bytes <= total), default=math.inf)
    left = MAX_TRIES - len(tries)
    leasts = keeper.leasts()
    # Nothing is refused before all plans were tried with the least that can be kept of them.
    order = sorted(range(len(leasts)), key=lambda i: leasts[i].num_bytes)
    untried = [i for i in order if _known(tries, leasts[i]) is None]
    asked = {t.plan for t in tries}
    untried += [i for i in range(keeper.usual, len(keeper.plans)) if i not in asked]
    last_resort = {"limit": 0.0, "only": untried[0]} if math.isinf(best_s) and untried else None
    if left <= (len(untried) if last_resort else 0):
        return last_resort if left else None
    # Where only the last plan fits, it is the one to refine.
    newest = tries[-1].plan
    limits = {
        plan: _limit(tries, total, keeper, plan)
        for plan in ([newest] if newest >= keeper.usual else range(keeper.usual))
    }
    for _ in range(MAX_TRIES * len(limits)):
        choices = {plan: keeper.within(limit, plan) for plan, limit in limits.items()}
        plan = min(choices, key=lambda i: _worse(choices[i], limits[i]))
        known = _known(tries, choices[plan])
        if known is None:
            is_worth = choices[plan].own_seconds < best_s * (1 - WORTH)
            return {"limit": limits[plan], "only": plan} if is_worth else None
        if known.num_bytes <= total:
            break
        if any(map(choices[plan].is_as, leasts)):
            del limits[plan]
        else:
            limits[plan] = choices[plan].num_bytes * (1 - WORTH)
        if not limits:
            break
    return last_resort


def _limit(tries: list[Try], total: int, keeper: PlanKeeper, plan: int) -> float:
    """Return the bytes that what is kept of a plan may take, by the keeper's own count.

    What is measured and that count differ by what the keeper does not see: gathered leaves,
    gradients, what one segment computes. That difference may be another one for another plan. For
    one plan it changes little with the choice; its last two tries say how much.
    """
    of_plan = [t for t in tries if t.plan == plan]
    *before, last = of_plan or tries[-1:]
    measured, counted = last.num_bytes, _counted(last, keeper)
    if measured <= total or not before:
        return counted - (measured - total)
    falls = (before[-1].num_bytes - measured) / max(_counted(before[-1], keeper) - counted, 1)
    limit = counted - (measured - total) / min(max(falls, LEAST_FALL), 1.0)
    return limit - SAFETY * max(limit, 0.0)


def _counted(tried: Try, keeper: PlanKeeper) -> float:
    """Return the bytes of a try by the keeper's own count."""
    return (tried.keeping or keeper.everything()).num_bytes


def _worse(choice: Keeping, limit: float) -> tuple[float, float, float]:
    """Return a key by which the better of two choices comes first: one that is within its limit,
    then the faster one."""
    over = max(choice.num_bytes - limit, 0.0)
    return over, choice.seconds, choice.num_bytes


def _with_reuse(tries: list[Try], total: int, keeper: PlanKeeper) -> dict[str, Any] | None:
    """Return the same for leaves that stay gathered, once something fits without."""
    best = min((t for t in tries if t.num_bytes <= total), key=lambda t: t.seconds, default=None)
    if best is None or len(tries) == MAX_TRIES:
        return None
    # The last try with such leaves says best what the keeper does not see.
    with_reuse = [t for t in tries if t.keeping and t.keeping.reused.elements]
    seen = with_reuse[-1] if with_reuse else best
    limit = total - (seen.num_bytes - _counted(seen, keeper))
    limit -= SAFETY * max(limit, 0.0) * len(with_reuse)
    choice = keeper.within(limit, seen.plan, reuse=True)
    is_worth = choice.seconds < best.seconds * (1 - WORTH) and _known(tries, choice) is None
    return {"limit": limit, "reuse": True, "only": seen.plan} if is_worth else None


def _known(tries: list[Try], choice: Keeping) -> Try | None:
    """Return the try that had the same choice; None if there is none."""
    return next((t for t in tries if t.keeping is not None and t.keeping.is_as(choice)), None)
