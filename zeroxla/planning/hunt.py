"""Tries settings one after another, and leaves out those that cannot be the best."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from zeroxla.mesh.axes import PIPE, SPLIT_AXES
from zeroxla.planning.choices import Choice, attempts, counts_of
from zeroxla.planning.lanes import COMPUTE
from zeroxla.planning.plan import Plan
from zeroxla.planning.trials import Trials

WORTH = 0.98
"""Other presets of a mesh with stages or axes are tried if a step could take less than this share
of the best one's time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A choice, and its plan."""

    choice: Choice
    plan: Plan

    @property
    def limit(self) -> str:
        """What limits it: memory if it does not fit, otherwise the lane that is taken longest."""
        return self.plan.limit if self.plan.fits else "memory"


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Hunt:
    """Tries settings, and keeps what it finds.

    Attributes:
      trials: plans a setting.
      zeros: the names of presets.
      progress: as `search_plans` takes it.
      found: the plan of each group of settings.
      refused: the settings that could not be planned, by the reason why.
      best_s: the seconds of the fastest step that fits; None if none does.
    """

    trials: Trials
    zeros: Sequence[str]
    progress: Callable[[int, int, str], None]
    found: list[Found] = dataclasses.field(default_factory=list)
    refused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    best_s: float | None = None
    _fitting: dict[bool | None, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refused.update(self.trials.variants.refused)

    def search(self, shapes: Sequence[Mapping[str, int]]) -> None:
        """Try all presets on meshes, with and without recomputation.

        Args:
          shapes: the lengths of the meshes' axes.
        """
        variants = self.trials.variants
        if not variants.has_pipelines:
            shapes = [shape for shape in shapes if shape.get(PIPE, 1) == 1]
        # What recomputes needs least memory, and says whether the rest can fit.
        remats = sorted(variants.models, key=lambda remat: remat is not True)
        groups = [(shape, remat) for shape in shapes for remat in remats]
        total = len(groups) * len(self.zeros)
        hopeless: set[str] = set()
        for i, (shape, remat) in enumerate(groups):
            if is_split(shape) or shape.get(PIPE, 1) > 1:
                words, done = _words(shape), i * len(self.zeros)
                if words not in hopeless and not self._split_group(shape, remat, done, total):
                    hopeless.add(words)
                continue
            for k, zero in enumerate(self.zeros):
                self._say(i * len(self.zeros) + k, total, zero, shape)
                self._first_that_fits(attempts(zero, shape, remat, self.trials.rows))
        self.progress(total, total, "")

    def _split_group(
        self, shape: Mapping[str, int], remat: bool | None, done: int, total: int
    ) -> bool:
        """Try presets on a mesh with stages, or axes that split the work on one row; return whether
        the first preset fits."""
        for k, zero in enumerate(self.zeros):
            self._say(done + k, total, zero, shape)
            if shape.get(PIPE, 1) > 1:
                found = self._first_that_fits(attempts(zero, shape, remat, self.trials.rows))
            else:
                found = self._fewest_that_fit(zero, shape, remat)
            if k:
                continue
            if found is None or not found.plan.fits:
                return False
            if least_s(found.plan) >= WORTH * (self.best_s or found.plan.time.seconds):
                break
        return True

    def _first_that_fits(self, choices: Iterable[Choice]) -> Found | None:
        """Keep the first choice that fits, or the last one that can be planned, and return it."""
        last: Found | None = None
        for choice in choices:
            tried = self._tried(choice)
            last = tried or last
            if tried is not None and tried.plan.fits:
                break
        self._keep(last)
        return last

    def _fewest_that_fit(
        self, zero: str, shape: Mapping[str, int], remat: bool | None
    ) -> Found | None:
        """Keep the plan with the fewest micro-batches that fit, and return it; if none do, the one
        with the most.

        From each plan follows how much memory others need: activations shrink with the rows of a
        micro-batch, and the rest does not.
        """
        counts = counts_of(shape, self.trials.rows)
        low, high = 0, len(counts) - 1
        like_before = self._fitting.get(remat, 1)
        at = next((k for k, count in enumerate(counts) if count >= like_before), high)
        found: Found | None = None
        while low <= high:
            choice = Choice(
                zero=zero, mesh_shape=shape, microbatches=counts[at], weights=None, remat=remat
            )
            tried = self._tried(choice)
            if tried is None:
                break
            room = tried.plan.target.device.usable_bytes
            if tried.plan.fits:
                found, high = tried, at - 1
            else:
                found = found if found is not None and found.plan.fits else tried
                low = at + 1
            needs = {k: _needs(tried.plan, counts[at], counts[k]) for k in range(low, high + 1)}
            enough = [k for k, num_bytes in needs.items() if num_bytes <= room]
            if not enough and found.plan.fits:
                break
            at = enough[0] if enough else high  # the most micro-batches, to be sure
        self._keep(found)
        return found

    def _tried(self, choice: Choice) -> Found | None:
        """Return a choice with its plan; None if it cannot be planned."""
        try:
            return Found(choice=choice, plan=self.trials.plan(choice))
        except (ValueError, NotImplementedError) as error:
            self._refuse(error, ", ".join(choice.words()))
            return None

    def _keep(self, found: Found | None) -> None:
        if found is None:
            return
        self.found.append(found)
        seconds = found.plan.time.seconds
        if found.plan.fits and found.choice.weights is None:
            self._fitting[found.choice.remat] = found.choice.microbatches
        if found.plan.fits and (self.best_s is None or seconds < self.best_s):
            self.best_s = seconds

    def _refuse(self, error: Exception, words: str) -> None:
        """Note why a setting cannot be planned; reasons that differ in numbers alone are one."""
        alike = {_without_numbers(why): why for why in self.refused}
        why = alike.get(_without_numbers(str(error)), str(error))
        self.refused.setdefault(why, []).append(words)

    def _say(self, done: int, total: int, zero: str, shape: Mapping[str, int]) -> None:
        self.progress(done, total, f"{zero}, {_words(shape)}")


def is_split(shape: Mapping[str, int]) -> bool:
    """Return whether a mesh has axes that split the work on one row."""
    return any(shape.get(axis, 1) > 1 for axis in SPLIT_AXES)


def least_s(plan: Plan) -> float:
    """Return the least seconds of a step with another preset: presets change the bytes of leaves
    and gradients, not what the device computes and what travels over axes that split the work."""
    busy = plan.time.busy_s
    return max(busy[COMPUTE], *(busy.get(axis, 0.0) for axis in SPLIT_AXES))


def rank(plan: Plan) -> tuple[bool, float]:
    """Return the sort key of a plan: plans that fit first, by speed; then the others, by memory."""
    return not plan.fits, -plan.tokens_per_s if plan.fits else plan.most_bytes


def _needs(plan: Plan, planned: int, other: int) -> float:
    """Return the bytes that a device would need with another number of micro-batches."""
    activations = plan.memory.activation_bytes
    return plan.most_bytes + activations * (planned / other - 1)


def _words(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in shape.items())


def _without_numbers(text: str) -> str:
    return re.sub(r"\w*=?\d[\d,.]*", "#", text)
