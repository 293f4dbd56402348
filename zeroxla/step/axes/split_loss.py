"""A model's loss, split over the axes of a mesh.

One axis after the other: the loss is traced, a plan for the axis is searched and proved, and the
function that runs the plan is the loss for the next axis. Its leaves are the parts that a device
computes with. Its collectives are equations like any other, so the fetch plan, the gathers and the
gradients of a step need not know of the axes. Arrays of the batch that a plan reads in parts alone
are given in these parts, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zeroxla.mesh.axes import CONTEXT, TENSOR
from zeroxla.mesh.placement import AxisPart
from zeroxla.program.paths import paths_of
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Program, Value, trace
from zeroxla.split.atoms import choosing
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_report import AxisReport
from zeroxla.split.holdings import COPIES, WHOLE, Holding
from zeroxla.split.input_parts import parts_read
from zeroxla.split.layout import layout_of
from zeroxla.split.lengths.padded_program import with_padded_lengths
from zeroxla.split.plan_proof import PlanProof
from zeroxla.split.run_plan import PlanRunner
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisPlan
from zeroxla.step.axes.axis_planner import AxisPlanner, known_holding
from zeroxla.step.axes.pins import Pins
from zeroxla.step.axes.split_batch import BatchParts, SplitBatch

Parts = Sequence[tuple[AxisPart, ...]]
"""For each leaf the parts along the axes that split it, in the order in which they are taken."""

Loss = Callable[..., Any]
"""(params, model_state, batch, key) -> (loss, metrics, model_state)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitLoss:
    """A loss split over axes, for arguments of one shape.

    Attributes:
      plans: the plan for each axis, in the order in which they were made.
      axes: (name, length) of each axis.
      parts: the parts of each leaf.
      batch: the parts of each array of the batch that a device is given.
      result: the tree structure of the loss' result.
      names: the path of each leaf.
      batch_names: the path of each array of the batch.
      padded: by their size, to how many elements sequences are padded.
    """

    plans: tuple[AxisPlan, ...]
    axes: tuple[tuple[str, int], ...]
    parts: tuple[tuple[AxisPart, ...], ...]
    batch: BatchParts
    result: Any
    names: tuple[str, ...]
    batch_names: tuple[str, ...]
    padded: Mapping[int, int]

    @staticmethod
    def of(
        loss: Loss,
        axes: Sequence[tuple[str, int]],
        params: Any,
        model_state: Any,
        batch: Any,
        key: Any,
        parts: Parts | None = None,
        *,
        rows_apart: bool = True,
        costs: Mapping[str, AxisCosts],
        proof: PlanProof | None = None,
        pins: Pins | None = None,
    ) -> SplitLoss:
        """Search plans. Call it where the names of the axes are known, as inside `shard_map`.

        Args:
          loss: the loss of whole arrays.
          axes: (name, length) of each axis.
          params: the shapes of the whole leaves.
          model_state, batch, key: the other arguments, or their shapes. If the batch is a
            `SplitBatch`, the parts of its arrays are decided; otherwise they are decided here.
          parts: the parts of each leaf, if they are decided; None decides them.
          rows_apart: whether the parts of the batch may be parts of its rows.
          costs: what each axis costs.
          proof: what has been proved before.
          pins: what a user says about leaves and arrays.

        Raises:
          ValueError: an axis can split no product with a leaf, or not what a user has pinned; or
            the parts do not fit the program.
        """
        given = batch.parts if isinstance(batch, SplitBatch) else None
        rows = batch.whole() if isinstance(batch, SplitBatch) else batch
        rest = shapes_of((model_state, rows, key))
        program, result = trace(loss, params, *rest)
        num_leaves = len(jax.tree.leaves(params))
        counts = [num_leaves, *(len(jax.tree.leaves(x)) for x in rest)]
        first = num_leaves + counts[1]
        program, padded = _with_lengths(program, axes, counts)
        plans: list[AxisPlan] = []
        found: list[tuple[AxisPart, ...]] = [()] * (first + counts[2])
        for name, length in axes:
            known = None if parts is None else [_along(name, each) for each in parts]
            planner = AxisPlanner(
                name=name,
                length=length,
                costs=costs[name],
                proof=PlanProof() if proof is None else proof,
                leaves=() if pins is None else pins.of_leaves(name),
                arrays=() if pins is None else pins.splits.pins("arrays", name),
            )
            plan = planner.plan(program, counts, known)
            in_batch = range(first, first + counts[2])
            held = _read(plan, in_batch, length, rows_apart=rows_apart)
            if given is not None:
                held = _given(plan, in_batch, [_along(name, each) for each in given])
            inputs = [(held[i],) if i in held else x for i, x in enumerate(plan.inputs)]
            plan = dataclasses.replace(plan, inputs=tuple(inputs))
            plans.append(plan)
            for i, (own,) in enumerate(plan.inputs[: first + counts[2]]):
                if own not in (COPIES, WHOLE):
                    found[i] = (*found[i], _part(plan, i, own, name, length))
            runner = _runner(plan, name, length)
            shapes = [_shape(plan, v, i, length) for i, v in enumerate(program.inputs)]
            program, _ = trace(lambda *args, run=runner: run(args), *shapes)
        return SplitLoss(
            plans=tuple(plans),
            axes=tuple(axes),
            parts=tuple(found[:num_leaves]),
            batch=tuple(found[first:]),
            result=(result, program),
            names=tuple("/".join(path) for path, _ in paths_of(params)),
            batch_names=tuple("/".join(path) for path, _ in paths_of(rows)),
            padded=padded,
        )

    def reports(self) -> tuple[AxisReport, ...]:
        """Return what is split along each axis."""
        pairs = zip(self.plans, self.axes, strict=True)
        return tuple(self._report(plan, *axis) for plan, axis in pairs)

    def _report(self, plan: AxisPlan, axis: str, length: int) -> AxisReport:
        padded = self.padded if axis == CONTEXT else {}
        found = AxisReport.of(plan, axis, length, self.names)
        return dataclasses.replace(found, batch=self._batch_along(axis), padded=padded)

    def _batch_along(self, axis: str) -> dict[str, int | None]:
        """Return for each array of the batch the dim that is split along an axis."""
        own = [_along(axis, parts) for parts in self.batch]
        dims = [None if part is None else part.dim for part in own]
        return dict(zip(self.batch_names, dims, strict=True))

    def __call__(self, params: Any, model_state: Any, batch: SplitBatch, key: jax.Array) -> Any:
        """Return what the loss returns, from this device's parts of the leaves and of the
        batch."""
        result, program = self.result
        return result.unflatten(program(*jax.tree.leaves((params, model_state, batch, key))))


def _read(
    plan: AxisPlan, inputs: Sequence[int], length: int, *, rows_apart: bool
) -> dict[int, Holding]:
    """Return the parts in which a plan reads some inputs, for those that it reads in one alone."""
    read, values = parts_read(plan, length), plan.program.inputs
    found = {i: read[values[i]] for i in inputs if values[i] in read}
    return {i: held for i, held in found.items() if rows_apart or held.dim != 0}


def _given(
    plan: AxisPlan, inputs: Sequence[int], parts: Sequence[AxisPart | None]
) -> dict[int, Holding]:
    """Return the holdings that known parts of some inputs are."""
    values = plan.program.inputs
    pairs = zip(inputs, parts, strict=True)
    return {i: known_holding(plan.flow, values[i], own) for i, own in pairs if own is not None}


def _with_lengths(
    program: Program, axes: Sequence[tuple[str, int]], counts: Sequence[int]
) -> tuple[Program, dict[int, int]]:
    """Return a program whose sequences `context` can split, if there is such an axis; and the
    lengths that it pads."""
    lengths = dict(axes)
    if CONTEXT not in lengths:
        return program, {}
    first = counts[0] + counts[1]
    of_context, of_tensor = lengths[CONTEXT], lengths.get(TENSOR, 1)
    return with_padded_lengths(
        program,
        counts[0],
        slice(first, first + counts[2]),
        divisor=of_context,
        # A ring wants two runs of positions for each device; `tensor` splits what they have.
        multiples=(2 * of_context * of_tensor, 2 * of_context),
    )


def _runner(plan: AxisPlan, name: str, length: int) -> Callable[[Sequence[jax.Array]], Any]:
    run = PlanRunner(plan, SplitAxis(parts=length, name=name))
    return lambda args: run([{h: x} for (h,), x in zip(plan.inputs, args, strict=True)])


def _shape(plan: AxisPlan, value: Value, i: int, length: int) -> jax.ShapeDtypeStruct:
    (held,), dims = plan.inputs[i], plan.flow.dims[value]
    with choosing(held.atom):
        axis, shape = SplitAxis(parts=length), list(value.aval.shape)
        if held.dim is not None:
            shape[held.dim] = axis.dim_size(dims[held.dim])
    return jax.ShapeDtypeStruct(tuple(shape), value.aval.dtype)


def _part(plan: AxisPlan, i: int, held: Holding, name: str, length: int) -> AxisPart:
    assert held.dim is not None
    with choosing(held.atom):
        pieces = layout_of(plan.flow.dims[plan.program.inputs[i]][held.dim])
    return AxisPart(axis=name, length=length, dim=held.dim, pieces=pieces)


def _along(name: str, parts: Sequence[AxisPart]) -> AxisPart | None:
    return next((part for part in parts if part.axis == name), None)
