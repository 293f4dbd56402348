"""`AxisPlanner`: finds the plan of a program for one axis, and proves it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

from zeroxla.config.splits import SplitPin
from zeroxla.mesh.placement import AxisPart
from zeroxla.program import compat
from zeroxla.program.trace import Program, Value
from zeroxla.split.atoms import Atom, Dims, atoms_in, choosing, dims_of, expand
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.experts import experts_of
from zeroxla.split.holdings import COPIES, Holding, part
from zeroxla.split.layout import layout_of, structured_dims
from zeroxla.split.pins import PinsOfAxis
from zeroxla.split.plan_checks import check_splits, repeated_work
from zeroxla.split.plan_proof import PlanProof, Verdict, WayTrial
from zeroxla.split.search import AxisSearch
from zeroxla.split.ways import AxisPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxisPlanner:
    """Finds plans for one axis.

    Attributes:
      name: the axis.
      length: its length.
      costs: what conversions and work cost.
      proof: proves the plans, and remembers what it has found out.
      leaves: for each leaf its path, and what a user has said about it; none for no leaf pins.
      arrays: what a user has said about arrays.
    """

    name: str
    length: int
    costs: AxisCosts
    proof: PlanProof
    leaves: Sequence[tuple[str, SplitPin | None]] = ()
    arrays: Sequence[SplitPin] = ()

    def plan(
        self, program: Program, counts: Sequence[int], known: Sequence[AxisPart | None] | None
    ) -> AxisPlan:
        """Search a plan of a program, and prove it. Equations that compute something else in parts
        stay whole.

        Args:
          program: the program.
          counts: the numbers of arrays of params, model state, batch and key.
          known: the part of each leaf, if they are decided.

        Raises:
          ValueError: the axis can split no product with a leaf, or not what a user has pinned.
        """
        num_leaves = counts[0]
        values = program.inputs[:num_leaves]
        leaves: list[Dims] = [dims_of(v.aval.shape) for v in values]
        if known is not None:
            pairs = zip(values, known, strict=True)
            leaves = [_as_known(v, own) for v, own in pairs]
        flow = DimsFlow.of(program, leaves, compat.inlined_jaxpr)
        first = num_leaves + counts[1]
        rows = _classes(flow, program.inputs[first : first + counts[2]])
        role = AxisRole(name=self.name, rows=rows, experts=experts_of(flow))
        holdings = None
        if known is not None:
            holdings = [known_holding(flow, v, own) for v, own in zip(values, known, strict=True)]
        pins = PinsOfAxis(flow=flow, role=role, parts=self.length)
        fixed = {
            v: pins.leaf(v, path, pin) if holdings is None else holdings[i]
            for i, (v, (path, pin)) in enumerate(zip(values, self.leaves, strict=False))
            if pin is not None
        }
        fixed = pins.in_bodies(fixed)
        pinned = pins.arrays(self.arrays, all_match=known is None)
        while True:
            search = AxisSearch(
                parts=self.length,
                role=role,
                costs=self.costs,
                proof=self.proof,
                fixed=fixed,
                pinned=pinned,
            )
            plan = search.plan(flow, num_leaves, holdings)
            found = self.proof.check(plan, self.length)
            self._warn(found[Verdict.WRONG], found[Verdict.UNKNOWN])
            if not found[Verdict.WRONG]:
                check_splits(plan, self.name, self.length)
                # Later plans, of decided leaves, are of the same model: one warning is enough.
                if known is None and (text := repeated_work(plan, self.name, self.length)):
                    warnings.warn(text, stacklevel=2)
                return plan

    def _warn(self, wrong: Sequence[WayTrial], unknown: Sequence[WayTrial]) -> None:
        axis = f"{self.name}={self.length}"
        if wrong:
            words = "; ".join(trial.in_words() for trial in wrong)
            warnings.warn(
                f"{axis}: a small instance of {words} computed something else in parts, so it is "
                "not split in this way; that is a mistake of zeroxla: please report the model",
                stacklevel=2,
            )
        if unknown:
            words = "; ".join(trial.in_words() for trial in unknown)
            warnings.warn(
                f"{axis}: no small instance of {words} could be run, so it is split without proof; "
                "please report the model",
                stacklevel=2,
            )


def _as_known(value: Value, own: AxisPart | None) -> Dims:
    shape = value.aval.shape
    return dims_of(shape) if own is None else structured_dims(shape, own.dim, own.pieces)


def known_holding(flow: DimsFlow, value: Value, own: AxisPart | None) -> Holding:
    """Return the holding that a part of an input is in a program; copies if there is no part."""
    if own is None:
        return COPIES
    for atom in dict.fromkeys(atoms_in(flow.dims[value][own.dim])):
        with choosing(atom):
            if layout_of(flow.dims[value][own.dim]) == own.pieces:
                return part(own.dim, atom)
    raise ValueError(
        f"an array of shape {value.aval.shape} is split over {own.axis!r} along dim {own.dim} into "
        f"{own.pieces}, which this batch's program cannot compute with; use batches of one shape, "
        "or another step for this one"
    )


def _classes(flow: DimsFlow, batch: Sequence[Value]) -> frozenset[Atom]:
    """Return the classes of a batch's rows."""
    return frozenset(a for v in batch if v.aval.shape for a in atoms_in(expand(flow.dims[v][0])))
