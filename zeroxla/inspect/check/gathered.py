"""Check: no large part of the model must be whole on a device at one time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from zeroxla.fetch.segments import FetchPlan, Remat, Straight
from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.program.compat import model_line
from zeroxla.program.primitives import CASTS, CUSTOM_RULES, LOOPS, REMATS, SLICES
from zeroxla.program.report import format_bytes
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Value
from zeroxla.program.walk import bodies

NAME = "gathered"

MOST_SHARE = 0.5
"""The largest share of the model's parameters that may be gathered at once without need."""


_NAMED = 4  # leaves or lines that a result names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Together:
    """Leaves that are whole on a device at the same time, however small units are.

    Attributes:
      leaves: the leaves of the model.
      elements: how many elements are whole; of a leaf that a loop slices, one layer counts.
      reader: the equation that reads most of them.
    """

    leaves: tuple[Value, ...]
    elements: int
    reader: Equation | None


def check_gathered(checked: CheckedModel) -> CheckResult:
    """Plan the gathers with units as small as they can be, and look for what is still large.

    It is a fault if one place needs more than half of the model whole, because of how the model is
    written: a conditional or custom rule over many leaves, or stacked leaves that are indexed layer
    by layer and not sliced by a `scan`. A single large leaf, such as an embedding, is none, and
    neither are leaves that each turn of a loop reads. Nothing runs.
    """
    plan = _finest_plan(checked)
    paths = [checked.layout.leaves[i].path for i in checked.layout.indices(fetched=True)]
    names = dict(zip(plan.leaves, paths, strict=True))
    total = sum(leaf.elements for leaf in checked.layout)
    indexed = _indexed(plan)
    share = sum(v.aval.size for v in indexed) / max(total, 1)
    if share > MOST_SHARE:
        lines = dict.fromkeys(_line(eq) for eqs in indexed.values() for eq in eqs)
        return _fault(
            f"{_few([names[v] for v in indexed])}, {share:.0%} of this model, stacked layers that "
            f"are read a layer at a time, but not as the xs of a scan "
            f"({_few([line for line in lines if line])}): each read gathers all layers",
            "loop over the layers with jax.lax.scan (flax: nn.scan, nnx.scan), whose xs are the "
            "stacked leaves; or keep a leaf for each layer",
        )
    together = list(_together(plan, {v: v for v in plan.leaves}))
    largest = max(together, key=lambda t: t.elements, default=None)
    if largest is None:
        return CheckResult(name=NAME, verdict="ok", found="nothing is gathered: no leaf is split")
    share = largest.elements / max(total, 1)
    words = f"{_few([names[v] for v in largest.leaves])}, {share:.0%} of this model"
    eq = largest.reader
    several = share > MOST_SHARE and len(largest.leaves) > 1
    if several and eq is not None and eq.name in CUSTOM_RULES | REMATS | {"cond"}:
        return _fault(
            f"{words}, must be whole at one time, because one equation reads them together: "
            f"{eq.name} at {_line(eq) or 'an unknown line'}",
            "keep conditionals and custom rules (custom_vjp, custom_jvp) to the leaves of one "
            "layer, and let a loop over layers be a jax.lax.scan with stacked leaves as xs",
        )
    size = format_bytes(4 * largest.elements)
    again = _times(plan)
    often = [f"{names[v]} {n} times" for v, n in again.items() if n > 1]
    more = f"; gathered again for a later use: {_few(often)}" if often else ""
    return CheckResult(
        name=NAME,
        verdict="ok",
        found=f"what must be whole at one time: at most {words} ({size} in float32){more}",
    )


def _finest_plan(checked: CheckedModel) -> FetchPlan:
    """Return the fetch plan of a training step in which each leaf is a unit."""
    step = checked.step
    programs = dataclasses.replace(
        step.programs, config=dataclasses.replace(step.programs.asked, unit_elements=1)
    )
    state = step.shapes()
    layout = programs.layout(state)
    with programs.tracing():
        return programs.plan(
            layout, state.model_state, step.batches.shapes(checked.batch), state.key
        )


def _together(plan: FetchPlan, outside: Mapping[Value, Value]) -> Iterator[_Together]:
    """Yield the leaves that are whole at one time, for each place of a plan.

    Args:
      plan: the plan, of the loss or of a body.
      outside: the model's leaf that each leaf of the plan is, or is a slice of.
    """
    for seg in plan.segments:
        own = sum(v.aval.size for v in seg.leaves)
        leaves = tuple(outside[v] for v in seg.leaves)
        if isinstance(seg, Straight):
            yield _Together(leaves=leaves, elements=own, reader=_reader(seg))
        elif isinstance(seg, Remat):
            yield from _together(seg.body, outside)
        else:
            pairs = zip(seg.body.leaves, seg.stacked.values(), strict=True)
            inside = {sliced: outside[leaf] for sliced, (leaf, _) in pairs}
            turns = list(_together(seg.body, inside))
            turn = max(turns, key=lambda t: t.elements, default=None)
            more = () if turn is None else turn.leaves
            yield _Together(
                leaves=(*leaves, *more),
                elements=own + (0 if turn is None else turn.elements),
                reader=seg.scan.equation if leaves or turn is None else turn.reader,
            )


def _reader(segment: Straight) -> Equation | None:
    """Return the equation that reads most leaves of a segment, by itself or as values that follow
    from leaves alone."""
    made: dict[Value, frozenset[Value]] = {v: frozenset((v,)) for v in segment.leaves}
    best: tuple[int, Equation | None] = (0, None)
    for eq in segment.equations:
        read = frozenset[Value]().union(*(made.get(v, frozenset()) for v in eq.values))
        if len(read) > best[0]:
            best = len(read), eq
        if all(v in made for v in eq.values):
            made.update((v, read) for v in eq.outputs)
    return best[1]


def _indexed(plan: FetchPlan) -> dict[Value, list[Equation]]:
    """Return the leaves that are read a layer at a time along their first dim, though no `scan`
    slices them: by several equations, or in a loop by its counter. With these equations."""
    readers: dict[Value, dict[int, Equation]] = {}
    whole: set[Value] = set()  # leaves that something else reads
    for seg in plan.segments:
        if isinstance(seg, Remat):
            for leaf, found in _indexed(seg.body).items():
                readers.setdefault(leaf, {}).update({id(eq.source): eq for eq in found})
            continue
        equations = seg.equations if isinstance(seg, Straight) else (*seg.known, seg.scan.equation)
        for leaf in seg.leaves:
            for eq, takes in _reads(equations, leaf):
                readers.setdefault(leaf, {})[id(eq.source)] = eq
                if not takes:
                    whole.add(leaf)
    return {
        leaf: list(found.values())
        for leaf, found in readers.items()
        if leaf not in whole and _covers(list(found.values()), leaf)
    }


def _reads(equations: Iterable[Equation], value: Value) -> Iterator[tuple[Equation, bool]]:
    """Yield the equations that read a leaf or its casts, those of loops' bodies included, with
    whether each takes one place of its first dim."""
    same = {value}
    for eq in equations:
        if same.isdisjoint(eq.values):
            continue
        if eq.name in CASTS:
            same.update(eq.outputs)
            continue
        inside = _constant_of_loop(eq, same)
        if inside is None:
            yield eq, _takes_a_layer(eq, value)
        else:
            yield from _reads(*inside)


def _constant_of_loop(
    eq: Equation, same: Collection[Value]
) -> tuple[tuple[Equation, ...], Value] | None:
    """Return the equations of a loop's body and the input by which they read a value, if each turn
    reads it whole; None otherwise."""
    if eq.name not in LOOPS:
        return None
    body, _ = bodies(eq)[0]
    first = eq.params["cond_nconsts"] if eq.name == "while" else 0
    count = eq.params["body_nconsts"] if eq.name == "while" else Scan(eq).num_consts
    constants = zip(eq.inputs[first : first + count], body.inputs, strict=False)
    given = [inside for operand, inside in constants if operand in same]
    is_once = sum(v in same for v in eq.values) == 1
    return (body.equations, given[0]) if given and is_once else None


def _covers(readers: Sequence[Equation], leaf: Value) -> bool:
    """Return whether equations that take one layer each read several layers."""
    varies = any(eq.name != "slice" for eq in readers)  # by a counter: all of them
    return len(readers) > 1 or varies


def _takes_a_layer(eq: Equation, leaf: Value) -> bool:
    """Return whether an equation takes one place of a leaf along its first dim."""
    shape = leaf.aval.shape
    if len(shape) < 2 or shape[0] < 2 or eq.name not in SLICES:
        return False
    sizes = eq.params.get("slice_sizes", eq.outputs[0].aval.shape)
    return len(sizes) == len(shape) and sizes[0] == 1 and tuple(sizes[1:]) == tuple(shape[1:])


def _times(plan: FetchPlan) -> dict[Value, int]:
    """Return in how many places outside loops each leaf is gathered."""
    found: Counter[Value] = Counter()
    for seg in plan.segments:
        found.update(_times(seg.body) if isinstance(seg, Remat) else seg.leaves)
    return dict(found)


def _line(eq: Equation) -> str:
    return model_line(eq.source)


def _few(words: Sequence[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _fault(found: str, remedy: str) -> CheckResult:
    return CheckResult(name=NAME, verdict="fault", found=found, remedy=remedy)
