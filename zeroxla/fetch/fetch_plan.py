"""The fetch plan: which unit is gathered before which equation, and released after which.

`make_plan` cuts a program into segments (see segments.py). Values that follow from leaves and
constants alone (casts, transposes, masks) count as the model, not as activations. An equation that
makes such a value has no place of its own. It is repeated in each segment that reads the value, so
that the value never lives from one segment to another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zeroxla.fetch.segments import FetchPlan, LayerLoop, Remat, Segment, Straight
from zeroxla.fetch.units import default_unit_elements, unit_of_each
from zeroxla.program.primitives import REDUCTIONS, REMATS, WINDOW_REDUCTIONS
from zeroxla.program.scan import Scan
from zeroxla.program.stacked_scan import find_stacked, loop_body
from zeroxla.program.trace import (
    Equation,
    Operand,
    Program,
    Value,
    active_values,
    closure,
    flatten_behind,
)

# A reduction of parameters alone (a norm, a penalty) is computed once and kept if its result is
# this many times smaller than its operands. These are then not gathered again for each reader.
_SUMMARY_RATIO = 8


def make_plan(
    program: Program,
    leaves: Sequence[Value],
    active: Iterable[Value],
    *,
    unit_elements: int | None,
    constants: Iterable[Value] = (),
    recoverable: Iterable[Value] | None = None,
    split_dims: Mapping[Value, int | None],
    gradient_of: Sequence[Operand] | None = None,
    opens_remat: bool = False,
) -> FetchPlan:
    """Cut `program` into segments.

    Args:
      program: the model's loss, or the body of one of its loops.
      leaves: the inputs that are gathered.
      active: the inputs with a gradient: trainable leaves and floating activations.
      unit_elements: the most elements of leaves gathered together, unless one leaf alone has more.
        None takes the model's repeated block.
      constants: see `FetchPlan`.
      recoverable: see `FetchPlan`. None means every input.
      split_dims: the dim along which each leaf is stored split; None for a leaf stored whole.
      gradient_of: the outputs that are differentiated. None means all.
      opens_remat: whether a `jax.checkpoint` body of one unit has a plan of its own, too.
    """
    gradient_of = program.outputs if gradient_of is None else gradient_of
    return _Planner(
        program=program,
        leaves=tuple(leaves),
        active=frozenset(active_values(program.equations, active, gradient_of)),
        unit_elements=unit_elements,
        constants=frozenset(constants),
        recoverable=frozenset(program.inputs if recoverable is None else recoverable),
        split_dims=split_dims,
        opens_remat=opens_remat,
    ).plan()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Planner:
    """Makes one plan; see `make_plan` for the fields.

    Attributes:
      known: the equation that makes each parameter-only value.
      segments: the segments so far.
    """

    program: Program
    leaves: tuple[Value, ...]
    active: frozenset[Value]
    unit_elements: int | None
    constants: frozenset[Value]
    recoverable: frozenset[Value]
    split_dims: Mapping[Value, int | None]
    opens_remat: bool

    known: dict[Value, Equation] = dataclasses.field(default_factory=dict)
    segments: list[Segment] = dataclasses.field(default_factory=list)

    def plan(self) -> FetchPlan:
        main = self._placed_equations()
        inner_unit_elements = self.unit_elements or self._default_unit_elements(main)
        outputs = [a for a in self.program.outputs if isinstance(a, Value)]
        jobs: list[Segment | tuple[Equation | None, tuple[Value, ...]]] = []
        for eq in main:
            jobs.append(self._loop(eq) or self._remat(eq, inner_unit_elements) or (eq, eq.values))
        # Outputs that follow from leaves and constants alone belong to no placed equation.
        if any(v in self.known or v in self.leaves for v in outputs):
            jobs.append((None, tuple(v for v in outputs if v in self.known or v in self.leaves)))

        needs = [() if isinstance(j, Segment) else self._leaves_of(j[1]) for j in jobs]
        order = list(dict.fromkeys(leaf for need in needs for leaf in need))
        shapes = [leaf.aval.shape for leaf in order]
        unit = dict(zip(order, unit_of_each(shapes, self.unit_elements), strict=True))

        run: list[tuple[Equation | None, tuple[Value, ...]]] = []
        here: dict[Value, None] = {}
        for job, need in zip(jobs, needs, strict=True):
            if isinstance(job, Segment):
                self._close(run, here)
                self.segments.append(job)
                continue
            missing = [leaf for leaf in need if leaf not in here]
            if here and {unit[leaf] for leaf in missing} - {unit[leaf] for leaf in here}:
                self._close(run, here)
                missing = list(need)
            run.append(job)
            here.update(dict.fromkeys(missing))
        self._close(run, here)
        self._set_outputs(outputs)
        units: dict[int, list[Value]] = {}
        for leaf in order:
            units.setdefault(unit[leaf], []).append(leaf)
        return FetchPlan(
            leaves=self.leaves,
            inputs=tuple(v for v in self.program.inputs if v not in set(self.leaves)),
            segments=tuple(self.segments),
            outputs=self.program.outputs,
            active=self.active,
            constants=self.constants,
            recoverable=self.recoverable,
            units=tuple(tuple(u) for u in units.values()),
        )

    def _placed_equations(self) -> list[Equation]:
        """Return the equations that get a place; put the parameter-only ones into `known`."""
        data = set(self.program.inputs) - set(self.leaves) - self.constants
        from_leaf = set(self.leaves)
        placed = []
        for eq in self.program.equations:
            is_data = not data.isdisjoint(eq.values)
            if not from_leaf.isdisjoint(eq.values):
                from_leaf.update(eq.outputs)
            if is_data or eq.is_pinned:
                data.update(eq.outputs)
                placed.append(eq)
            elif is_summary(eq) and not from_leaf.isdisjoint(eq.values):
                placed.append(eq)
            else:
                self.known.update((v, eq) for v in eq.outputs)
        return placed

    def _default_unit_elements(self, placed: Sequence[Equation]) -> int:
        uses = [leaf for eq in placed if eq.name != "scan" for leaf in self._leaves_of(eq.values)]
        return default_unit_elements([leaf.aval.shape for leaf in dict.fromkeys(uses)])

    def _leaves_of(self, values: Iterable[Value]) -> tuple[Value, ...]:
        roots = set(closure(values, self.known)[1])
        return tuple(leaf for leaf in self.leaves if leaf in roots)

    def _close(
        self, run: list[tuple[Equation | None, tuple[Value, ...]]], here: dict[Value, None]
    ) -> None:
        """Make a segment of the equations in `run`, and empty `run` and `here`."""
        if not run:
            return
        equations: dict[Equation, None] = {}
        inputs: dict[Value, None] = {}
        made: set[Value] = set()
        for eq, reads in run:
            known, roots = closure(reads, self.known)
            equations.update(dict.fromkeys(known))
            inputs.update((v, None) for v in roots if v not in made)
            if eq is not None:
                equations[eq] = None
                made.update(eq.outputs)
        leaves = tuple(here)
        outside = tuple(v for v in inputs if v not in here)
        self.segments.append(Straight(leaves, tuple(equations), outside, ()))
        run.clear()
        here.clear()

    def _set_outputs(self, outputs: Sequence[Value]) -> None:
        """Give each straight segment its outputs: the values that others read after it."""
        wanted = set(outputs)
        for i in reversed(range(len(self.segments))):
            seg = self.segments[i]
            if isinstance(seg, Straight):
                own = [v for eq in seg.equations for v in eq.outputs]
                if i == len(self.segments) - 1:  # it makes the program's parameter-only outputs
                    own += seg.leaves
                else:
                    own = [v for v in own if v not in self.known]
                outs = tuple(dict.fromkeys(v for v in own if v in wanted))
                self.segments[i] = dataclasses.replace(seg, outputs=outs)
            wanted.update(seg.inputs)

    def _loop(self, eq: Equation) -> LayerLoop | None:
        """Return the loop of a `scan` over stacked leaves; None for any other equation."""
        if eq.name != "scan":
            return None
        scan = Scan(eq)
        chains = {
            i: chain
            for i, x in enumerate(scan.xs, scan.first_x)
            if (chain := find_stacked(x, self.known, self.split_dims)) is not None
        }
        if not chains:
            return None
        others = tuple(
            a for i, a in enumerate(eq.inputs) if i not in chains and isinstance(a, Value)
        )
        known, roots = closure(others, self.known)
        leaves = tuple(leaf for leaf in self.leaves if leaf in roots)
        inputs = tuple(v for v in roots if v not in leaves)

        program, body_leaves = loop_body(scan, chains)
        by_position = {i: v for i, v in enumerate(program.inputs) if i not in chains}
        active = self._active_in_body(scan, program)
        active |= {body_leaves[i] for i, c in chains.items() if c.leaf in self.active}
        consts = [v for i, v in by_position.items() if i < scan.num_consts]
        xs = [v for i, v in by_position.items() if i >= scan.first_x]
        body = make_plan(
            program,
            list(body_leaves.values()),
            active,
            unit_elements=self.unit_elements or sum(v.aval.size for v in body_leaves.values()),
            constants=consts,
            recoverable=[*consts, *xs],
            split_dims={
                body_leaves[i]: c.dim_in_slice(self.split_dims[c.leaf]) for i, c in chains.items()
            },
            opens_remat=self.opens_remat,
        )
        stacked = {i - scan.first_x: (chain.leaf, chain.layer_dim) for i, chain in chains.items()}
        return LayerLoop(scan, leaves, tuple(known), inputs, stacked, body)

    def _active_in_body(self, scan: Scan, body: Program) -> set[Value]:
        """Return the body's inputs with a gradient. A carry has one if any turn gives it one."""
        operands = scan.equation.inputs
        active = {v for v, a in zip(body.inputs, operands, strict=True) if a in self.active}
        carries, results = scan.split_inputs(body.inputs)[1], scan.split_outputs(body.outputs)[0]
        while True:
            found = active_values(body.equations, active, body.outputs)
            carried = zip(carries, results, strict=True)
            more = {c for c, out in carried if out in found} - active
            if not more:
                return active
            active |= more

    def _remat(self, eq: Equation, unit_elements: int) -> Remat | None:
        """Return the plan of a `jax.checkpoint` body; None for any other equation, and for a body
        of one unit unless such are opened."""
        if eq.name not in REMATS:
            return None
        known, roots = closure(eq.values, self.known)
        leaves = [leaf for leaf in self.leaves if leaf in roots]
        if not leaves:
            return None
        inputs = tuple(roots)
        program = flatten_behind(eq.params["jaxpr"], inputs, known, eq.inputs)
        body = make_plan(
            program,
            leaves,
            [v for v in inputs if v in self.active],
            unit_elements=unit_elements,
            constants=self.constants.intersection(roots),
            split_dims=self.split_dims,
            opens_remat=self.opens_remat,
        )
        is_one = len(body.segments) == 1 and isinstance(body.segments[0], Straight)
        if is_one and not self.opens_remat:
            return None
        outside = tuple(v for v in inputs if v not in leaves)
        return Remat(inputs=outside, outputs=eq.outputs, body=body)


def is_summary(eq: Equation) -> bool:
    """Return whether a reduction is so much smaller than its operands that it is kept."""
    if eq.name not in REDUCTIONS | WINDOW_REDUCTIONS:
        return False
    read = sum(v.aval.size for v in eq.values)
    made = sum(v.aval.size for v in eq.outputs)
    return made * _SUMMARY_RATIO <= read


def has_closed_remat(plan: FetchPlan) -> bool:
    """Return whether a `jax.checkpoint` with leaves is an equation of a segment."""
    return any(
        any(eq.name in REMATS for eq in seg.equations)
        if isinstance(seg, Straight)
        else has_closed_remat(seg.body)
        for seg in plan.segments
    )
