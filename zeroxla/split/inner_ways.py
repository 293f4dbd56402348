"""Ways of equations that run programs of their own, whose bodies are searched: loops, parts that
are computed again, and custom derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value
from zeroxla.split.atoms import Atom, Dims, atoms_in
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Holding, part
from zeroxla.split.known_attention import ring_way
from zeroxla.split.ways import AxisPlan, Way, flow_alone


class PlansBodies(Protocol):
    """A search that can plan a body; `AxisSearch` is one."""

    @property
    def parts(self) -> int:
        """The length of the axis."""
        ...

    @property
    def role(self) -> AxisRole:
        """What may be split along the axis."""
        ...

    @property
    def costs(self) -> AxisCosts:
        """What conversions and work cost."""
        ...

    def along(self, atom: Atom) -> PlansBodies:
        """Return the search in which nothing but one class is split."""
        ...

    def inner(
        self,
        body: DimsFlow,
        given: Mapping[Value, Holding],
        chosen: Sequence[Value],
        outputs: Sequence[Sequence[Holding]],
    ) -> AxisPlan | None:
        """Return the cheapest plan of a body; None if there is none."""
        ...


def remat_ways(search: PlansBodies, flow: DimsFlow, eq: Equation) -> list[Way]:
    """Return the cheapest way of a `jax.checkpoint`."""
    (body,) = flow.bodies[eq]
    inputs = body.program.inputs
    plan = search.inner(body, {}, inputs, [()] * len(body.program.outputs))
    assert plan is not None, "nothing is required of the results"
    return [Way(plan.inputs, plan.outputs, cost=plan.cost, body=plan)]


def loop_ways(search: PlansBodies, flow: DimsFlow, eq: Equation) -> list[Way]:
    """Return the cheapest way of a loop for each holding of its carry, and the way in which its
    turns are dealt to the devices if there is one."""
    scan, (body,) = Scan(eq), flow.bodies[eq]
    consts, carry, xs = scan.split_inputs(body.program.inputs)
    found = []
    for choice in _carried(search, body, carry):
        given = dict(zip(carry, choice, strict=True))
        num_ys = len(body.program.outputs) - len(carry)
        allowed = [*((h,) for h in choice), *((),) * num_ys]
        plan = search.inner(body, given, (*consts, *xs), allowed)
        if plan is None:
            continue
        of_consts, of_carry, of_xs = scan.split_inputs(plan.inputs)
        of_ys = plan.outputs[len(carry) :]
        stacked = tuple(tuple(h.moved(1) for h in each) for each in of_xs)
        way = Way(
            (*of_consts, *of_carry, *stacked),
            (*choice, *(h.moved(1) for h in of_ys)),
            cost=plan.cost * scan.length,
            body=plan,
        )
        found.append(way)
    dealt = _dealt(search, flow, eq)
    return found if dealt is None else [*found, dealt]


def rule_ways(search: PlansBodies, flow: DimsFlow, eq: Equation) -> list[Way]:
    """Return the cheapest way of an equation with a derivative of its own, whole and along each
    class of its operands.

    Forward and backward are searched one after the other. Neither is differentiated, so what they
    convert has no transpose.
    """
    forward, backward = flow.bodies[eq]
    rule, num = flow.rules[eq], len(eq.outputs)
    work = search.costs.of_program(forward) + search.costs.of_program(backward)
    found = [Way(((WHOLE,),) * len(eq.inputs), (WHOLE,) * num, cost=work)]
    for atom in _classes(search, [flow.of_operand(x) for x in eq.inputs]):
        needs = [_along(flow.of_operand(x), atom) for x in eq.inputs]
        given = dict(zip(forward.program.inputs, needs, strict=True))
        wanted = [_along(flow.dims[v], atom) for v in eq.outputs]
        wanted = [WHOLE if h is COPIES else h for h in wanted]
        rest = len(forward.program.outputs) - num
        along = search.along(atom)
        first = along.inner(forward, given, (), [*((h,) for h in wanted), *((),) * rest])
        if first is None:
            continue
        kept = (*first.outputs[num:], *(wanted[i].dual for i in rule.outputs))
        given = dict(zip(backward.program.inputs, kept, strict=True))
        cts = [(needs[i].dual,) for i in rule.targets]
        second = along.inner(backward, given, (), cts)
        if second is None:
            continue
        way = Way(
            tuple((h,) for h in needs),
            tuple(wanted),
            classes=frozenset((atom,)),
            cost=first.cost + second.cost,
            body=first,
            backward=second,
        )
        found.append(way)
    ring = ring_way(eq, flow, search.parts, search.costs)
    return found if ring is None else [*found, ring]


def _along(dims: Dims, atom: Atom) -> Holding:
    """Return the holding of an array split along a class: copies if it does not have it once."""
    at = [d for d, dim in enumerate(dims) if atom in atoms_in(dim)]
    return part(at[0], atom) if len(at) == 1 else COPIES


def _classes(search: PlansBodies, arrays: Sequence[Dims]) -> list[Atom]:
    """Return the classes along which arrays may be split."""
    found = dict.fromkeys(a for dims in arrays for dim in dims for a in atoms_in(dim))
    return [a for a in found if a.size % search.parts == 0 and search.role.allows_class(a)]


def _carried(
    search: PlansBodies, body: DimsFlow, carry: Sequence[Value]
) -> list[tuple[Holding, ...]]:
    """Return the holdings that the carry of a loop may have: all whole, or for each class all
    arrays split that have it. What turns only add to may also be a sum of summands, such as the
    gradient of a leaf that each turn reads."""
    arrays = [body.dims[v] for v in carry]
    found = [(WHOLE,) * len(carry)]
    for atom in _classes(search, arrays):
        each = (_along(dims, atom) for dims in arrays)
        found.append(tuple(WHOLE if h is COPIES else h for h in each))
    added = [v.is_float and _is_added_to(body.program, i, v) for i, v in enumerate(carry)]
    for choice in tuple(found) if any(added) else ():
        pairs = zip(choice, added, strict=True)
        found.append(tuple(SUMMANDS if h is WHOLE and add else h for h, add in pairs))
    return list(dict.fromkeys(found))


def _dealt(search: PlansBodies, flow: DimsFlow, eq: Equation) -> Way | None:
    """Return the way in which each device takes its part of a loop's turns; None if there is none.

    Turns must not depend on each other: a carry is only added to.
    """
    scan, (body,) = Scan(eq), flow.bodies[eq]
    consts, carry, xs = scan.split_inputs(body.program.inputs)
    if not xs or not all(_is_added_to(body.program, i, v) for i, v in enumerate(carry)):
        return None
    turns = {a for x in scan.xs for a in atoms_in(flow.of_operand(x)[0])}
    if len(turns) != 1:
        return None
    (atom,) = turns
    if atom.size % search.parts or not search.role.allows_class(atom):
        return None
    work = search.costs.of_program(body) * scan.length / search.parts
    num_ys = len(eq.outputs) - len(carry)
    local = flow_alone(eq, flow)
    alone = scan.split_inputs(local.program.inputs)[2][0]
    index = next(atoms_in(local.dims[alone][0]))
    return Way(
        (*((COPIES,),) * len(consts), *((SUMMANDS,),) * len(carry), *((part(0, atom),),) * len(xs)),
        (*(SUMMANDS,) * len(carry), *(part(0, atom),) * num_ys),
        classes=frozenset((atom,)),
        cost=work,
        index=index,
        flow=local,
        turns=True,
    )


def _is_added_to(program: Program, i: int, carried: Value) -> bool:
    """Return whether a turn does nothing with its carry but add to it."""
    readers = [eq for eq in program.equations if carried in eq.values]
    if len(readers) != 1 or readers[0].name not in ("add", "add_any"):
        return program.outputs[i] is carried and not readers
    return (
        readers[0].outputs[0] is program.outputs[i] and list(readers[0].inputs).count(carried) == 1
    )
