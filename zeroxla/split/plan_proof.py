"""Proves the plan of an axis by computing, before it runs.

A plan is made of ways to run single equations, and of conversions between them. A way makes a
promise: from operands in the holdings that it needs it computes results in the holdings that it
gives, and from their cotangents, in the dual holdings, the cotangents of its operands. If each way
keeps this promise, so does the whole plan. So each is tried on a small instance of its equation,
against the equation whole (see `way_instance`). Equations that are alike, as those of repeated
blocks, are tried once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.program.likeness import likeness
from zeroxla.program.on_cpu import on_cpu
from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Atom, Dim, Dims, expand, pieces_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.way_instance import WayInstance
from zeroxla.split.ways import AxisPlan, Way

TOLERANCE = 1e-4
"""The largest error of float32, relative to the largest element: sums over parts are rounded in
another order."""

ROUNDINGS = 8
"""The same for shorter dtypes, in units of their rounding error."""

MOST_TOGETHER = 64
"""The most instances that are compiled together."""

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: an instance runs once, for microseconds."""


class Verdict(enum.Enum):
    """What the trial of a way has shown."""

    RIGHT = "right"
    WRONG = "it computes something else"
    UNKNOWN = "no small instance of it runs"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WayTrial:
    """A way of an equation of a program that is to be tried."""

    eq: Equation
    flow: DimsFlow
    way: Way

    @property
    def key(self) -> Hashable:
        """A value that is equal for trials that are alike."""
        way, numbers = self.way, {}
        assert way.flow is not None
        dims = [way.flow.dims[v] for v in (*way.flow.program.inputs, *self.eq.outputs)]
        written = tuple(_written(each, numbers) for each in dims)
        flows = tuple(self.flow.has_gradient(v) for v in (*self.eq.values, *self.eq.outputs))
        holdings = (*(h for (h,) in way.needs), *way.gives)
        held = tuple((h.kind, h.dim) for h in holdings)
        return likeness(self.eq), written, numbers.get(way.index), held, flows, way.turns

    def in_words(self) -> str:
        """Return the equation and the split as text."""
        arrays = " and ".join(v.aval.str_short() for v in self.eq.values)
        gives = ", ".join(map(repr, dict.fromkeys(self.way.gives)))
        scope = str(self.eq.name_stack)
        return f"{self.eq.name} of {arrays} as {gives}" + (f" (in {scope})" if scope else "")


@dataclasses.dataclass(frozen=True, slots=True)
class PlanProof:
    """Proves plans. It remembers what it has found out about ways.

    Attributes:
      right: the ways that have been found right; proofs may share it.
    """

    right: set[Hashable] = dataclasses.field(default_factory=set)
    _known: dict[Hashable, Verdict] = dataclasses.field(default_factory=dict)
    """The other ways."""
    _wrong: set[str] = dataclasses.field(default_factory=set)
    """The names of equations of which a way is wrong."""

    def check(self, plan: AxisPlan, parts: int) -> dict[Verdict, list[WayTrial]]:
        """Try all ways of a plan. Call it where the names of other axes are known, as inside
        `shard_map`.

        Args:
          plan: the plan.
          parts: the length of its axis.

        Returns:
          For each verdict the ways of which it was found now, one of each kind.
        """
        new: dict[Hashable, WayTrial] = {}
        for trial in _trials(plan):
            key = (parts, trial.key)
            if key not in self.right and key not in self._known:
                new.setdefault(key, trial)
        lengths = [_lengths(trial.eq, trial.flow) for trial in new.values()]
        with ThreadPoolExecutor(1) as apart:  # another thread is not inside `shard_map`
            verdicts = apart.submit(_try_all, list(new.values()), lengths, parts).result()
        found: dict[Verdict, list[WayTrial]] = {verdict: [] for verdict in Verdict}
        for (key, trial), verdict in zip(new.items(), verdicts, strict=True):
            found[verdict].append(trial)
            if verdict is Verdict.RIGHT:
                self.right.add(key)
                continue
            self._known[key] = verdict
            if verdict is Verdict.WRONG:
                self._wrong.add(trial.eq.name)
        return found

    def allows(self, eq: Equation, flow: DimsFlow, way: Way, parts: int) -> bool:
        """Return whether a way has not been found to be wrong."""
        if eq.name not in self._wrong or not _is_tried(way):
            return True
        return self._known.get((parts, WayTrial(eq, flow, way).key)) is not Verdict.WRONG


@functools.cache
def right_in_this_process() -> set[Hashable]:
    """Return the ways that steps of this process have found right."""
    return set()


def _is_tried(way: Way) -> bool:
    """Return whether a way runs its equation alone, and on anything but whole arrays."""
    return way.flow is not None and (way.is_split or any(h.adds_up for h in way.gives))


def _trials(plan: AxisPlan) -> Iterator[WayTrial]:
    """Yield the ways of a plan that are tried, those in bodies included."""
    for eq, way in plan.steps:
        if _is_tried(way):
            yield WayTrial(eq, plan.flow, way)
        for body in (way.body, way.backward):
            if body is not None:
                yield from _trials(body)


def _try_all(
    trials: Sequence[WayTrial], lengths: Sequence[Mapping[str, int]], parts: int
) -> list[Verdict]:
    """Return what each way is found to be.

    Args:
      trials: the ways.
      lengths: the lengths of other axes by name that each equation names.
      parts: the length of the axis.
    """
    found = [Verdict.UNKNOWN] * len(trials)
    open_ = [
        (i, WayInstance.options(t.eq, t.flow, t.way, parts, others))
        for i, (t, others) in enumerate(zip(trials, lengths, strict=True))
    ]
    with on_cpu():
        while open_:  # an instance that does not run is tried in other sizes
            now = [(i, options[0]) for i, options in open_ if options]
            verdicts: list[Verdict] = []
            for k in range(0, len(now), MOST_TOGETHER):
                verdicts += _try([x for _, x in now[k : k + MOST_TOGETHER]])
            found = _replaced(found, [i for i, _ in now], verdicts)
            open_ = [
                (i, options[1:]) for i, options in open_ if options and found[i] is Verdict.UNKNOWN
            ]
    return found


def _replaced(found: list[Verdict], places: list[int], new: list[Verdict]) -> list[Verdict]:
    known = dict(zip(places, new, strict=True))
    return [known.get(i, verdict) for i, verdict in enumerate(found)]


def _try(instances: Sequence[WayInstance]) -> list[Verdict]:
    """Run instances, in one program."""
    found: list[Verdict] = []

    def run(operands: Sequence[list[jax.Array]]) -> list[tuple[list, list]]:
        found[:] = [Verdict.RIGHT] * len(instances)
        both = []
        for i, (instance, arrays) in enumerate(zip(instances, operands, strict=True)):
            whole, parts = [], []
            try:
                whole = instance.whole(arrays)
            except Exception:
                found[i] = Verdict.UNKNOWN
                continue
            try:
                parts = instance.in_parts(arrays)
            except NotImplementedError:
                found[i] = Verdict.UNKNOWN
            except Exception:
                found[i] = Verdict.WRONG
            both.append((i, whole, parts))
        return both

    operands = [x.operands() for x in instances]
    compiled = jax.jit(run).lower(operands).compile(OPTIONS)
    for i, whole, parts in compiled(operands):
        if found[i] is Verdict.RIGHT and not all(map(is_close, whole, parts)):
            found[i] = Verdict.WRONG
    return found


def is_close(whole: jax.Array, parts: jax.Array) -> bool:
    """Return whether every part is a whole array, up to rounding.

    Elements that are not finite must be the same.
    """
    one, each = np.asarray(whole), np.asarray(parts)
    if each.shape[1:] != one.shape or each.dtype != one.dtype:
        return False
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return bool(np.all(each == one))
    rounding = ROUNDINGS * float(jnp.finfo(one.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(one.dtype, jnp.complexfloating) else np.float64
    one, each = one.astype(wide), each.astype(wide)
    finite = np.isfinite(one)
    largest = np.abs(one[finite]).max(initial=1e-30)
    error = np.abs(each[:, finite] - one[finite])
    others = np.broadcast_to(one[~finite], each[:, ~finite].shape)
    same = np.array_equal(each[:, ~finite], others, equal_nan=True)
    return same and bool(np.all(error <= max(TOLERANCE, rounding) * largest))


def _written(dims: Dims, numbers: dict[Atom, int]) -> Hashable:
    """Return how dims are made of atoms, which are numbered in the order in which they occur."""

    def each(dim: Dim) -> Iterator[Hashable]:
        for atom in expand(dim):
            pieces = pieces_of(atom)
            number = numbers.setdefault(atom, len(numbers))
            yield tuple(tuple(each(piece)) for piece in pieces) or (number, atom.size)

    return tuple(tuple(each(dim)) for dim in dims)


def _lengths(eq: Equation, flow: DimsFlow) -> dict[str, int]:
    """Return the lengths of the axes that an equation or its programs name."""
    found: dict[str, int] = {}
    for key in ("axis_name", "axes"):
        named = eq.params.get(key, ())
        for name in named if isinstance(named, tuple | list) else (named,):
            if isinstance(name, str):
                found[name] = lax.axis_size(name)
    for body in flow.bodies.get(eq, ()):
        for inner in body.program.equations:
            found |= _lengths(inner, body)
    return found
