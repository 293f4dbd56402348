"""Ways of equations on rows that are sorted by expert: products with a bank in parts, and what
stands between and behind them.

Models sort the pairs of a token and an expert by expert and multiply them with a bank by
`jax.lax.ragged_dot`, which takes the sizes of the groups. If each device has the matrices of its
own groups, it needs their rows alone. Which these are is known when the program runs, so such
arrays are `ragged` (see `holdings`): they have room for all rows. An activation between two
products goes through row by row. Behind the last product rows go back to their tokens and are added
up, which is linear: it is done with summands, and tokens are reduced, not pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import jax.numpy as jnp
import numpy as np

from zeroxla.program.likeness import likeness
from zeroxla.program.primitives import (
    BY_ROWS,
    CUSTOM_RULES,
    KEEPS_VALUES,
    LINEAR,
    LINEAR_IN_ONE,
    LOOPS,
    REMATS,
    SCALINGS,
    SUMS,
    SUMS_OF_MANY,
)
from zeroxla.program.trace import Constant, Equation, Operand, Value, is_float
from zeroxla.split.atoms import Atom, atoms_in, expand, pieces_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.expert_rules import group_dims
from zeroxla.split.holdings import COPIES, SUMMANDS, Holding, part, ragged
from zeroxla.split.ways import Way, flow_alone

_MOST_STEPS = 8
"""How far back it is looked whether two arrays of sizes are computed alike."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Knows the rows of a program that are sorted by expert.

    Attributes:
      flow: the flow through the program.
      parts: the length of the axis.
      rows: the values that can be ragged, with the holding that they have then.
      added: the values that are linear in such values.
    """

    flow: DimsFlow
    parts: int
    rows: dict[Value, Holding] = dataclasses.field(default_factory=dict)
    added: set[Value] = dataclasses.field(default_factory=set)
    _ways: dict[Equation, list[Way]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(flow: DimsFlow, parts: int) -> RaggedRows:
        """Follow the rows through a program, from its products with banks on."""
        found = RaggedRows(flow, parts)
        made_by = {v: eq for eq in flow.program.equations for v in eq.outputs}
        first: dict[Hashable, Operand] = {}  # of sizes that are computed alike
        for eq in flow.program.equations:
            way = None
            if (dims := group_dims(eq)) is not None:
                key = _likeness_of(eq.inputs[2], made_by)
                way = found._product(eq, dims, first.setdefault(key, eq.inputs[2]))
            elif any(x in found.rows for x in eq.values):
                way = found._by_rows(eq)
            if way is not None:
                found._ways.setdefault(eq, []).append(way)
                found.rows.update(zip(eq.outputs, way.gives, strict=True))
                for x, (need,) in zip(eq.inputs, way.needs, strict=True):
                    if need.sizes is not None and x not in found.rows:
                        found._copy(x, made_by)
            follows = any(x in found.rows or x in found.added for x in eq.values)
            if follows and eq.name in LINEAR_IN_ONE | CUSTOM_RULES:
                ways = found._of_summands(eq)
                found._ways.setdefault(eq, []).extend(ways)
                if ways or eq.name in LINEAR | SUMS | SCALINGS:
                    found.added.update(v for v in eq.outputs if v.is_float)
        return found

    def ways(self, eq: Equation, work: float) -> list[Way]:
        """Return the ways of an equation on such rows; none if it has no such operand.

        Args:
          eq: the equation.
          work: what it costs if one device runs all of it.
        """
        found = self._ways.get(eq, ())
        costs = (work / self.parts if way.is_split else work for way in found)
        return [dataclasses.replace(way, cost=c) for way, c in zip(found, costs, strict=True)]

    def _copy(self, operand: Operand, made_by: dict[Value, Equation], steps: int = 0) -> None:
        """Add the ways to compute what a product reads from copies, back to the tokens: then the
        gradients of tokens are reduced, and not those of each pair."""
        eq = made_by.get(operand) if isinstance(operand, Value) else None
        if eq is None or eq in self._ways or steps == _MOST_STEPS:
            return
        if eq.is_pinned or eq.name in LOOPS or not all(v.is_float for v in eq.outputs):
            return
        if eq.name != "gather" and any(map(self.flow.made_of_leaves, eq.inputs)):
            return
        num, local = len(eq.inputs), flow_alone(eq, self.flow)
        self._ways[eq] = [Way(((COPIES,),) * num, (COPIES,) * len(eq.outputs), None, local)]
        for x in eq.inputs:
            self._copy(x, made_by, steps + 1)

    def _product(self, eq: Equation, dims: tuple[int, int, int], sizes: Operand) -> Way | None:
        """Return the way of a product in which each device has the matrices of its own groups.

        Args:
          eq: the product.
          dims: see `group_dims`.
          sizes: the sizes of the groups.
        """
        rows, groups, made = dims
        _, bank, _ = eq.inputs
        if not self.flow.made_of_leaves(bank):
            return None
        atoms = expand(self.flow.of_operand(bank)[groups])
        if len(atoms) != 1 or pieces_of(atoms[0]) or atoms[0].size % self.parts:
            return None
        local = flow_alone(eq, self.flow)
        _, of_bank, of_sizes = local.program.inputs
        local.dims[of_sizes] = (local.dims[of_bank][groups],)
        (index,) = expand(local.dims[of_bank][groups])
        return Way(
            ((ragged(rows, sizes),), (part(groups, atoms[0]),), (COPIES,)),
            (ragged(made, sizes),),
            index,
            local,
            frozenset(atoms),
        )

    def _by_rows(self, eq: Equation) -> Way | None:
        """Return the way of an equation that computes rows from the same rows; None if it does
        not."""
        local = flow_alone(eq, self.flow)
        (alone,), inputs = local.program.equations, local.program.inputs
        i, held = next((i, self.rows[x]) for i, x in enumerate(eq.inputs) if x in self.rows)
        assert held.dim is not None
        assert held.sizes is not None
        if len(atoms := expand(local.dims[inputs[i]][held.dim])) != 1:
            return None
        (atom,) = atoms
        is_cut = pieces_of(atom) or atom.blocked or atom.sums or atom.is_compared or atom.is_loop
        if is_cut or not _is_by_rows(local, alone, atom):
            return None
        found: list[Holding] = []
        for v in (*inputs, *alone.outputs):
            at = [d for d, dim in enumerate(local.dims[v]) if atom in atoms_in(dim)]
            if len(at) > 1 or any(expand(local.dims[v][d]) != (atom,) for d in at):
                return None
            found.append(ragged(at[0], held.sizes) if at else COPIES)
        needs, gives = found[: len(inputs)], tuple(found[len(inputs) :])
        others = [self.rows[x] for x in eq.values if x in self.rows]
        if COPIES in gives or any(h.sizes is not held.sizes for h in others):
            return None
        return Way(tuple((h,) for h in needs), gives, None, local)

    def _of_summands(self, eq: Equation) -> list[Way]:
        """Return the ways to run a linear equation on summands that other programs do without."""
        if not all(v.is_float for v in eq.outputs):
            return []
        needs: list[tuple[Holding, ...]] = []
        if eq.name == "gather" and _adds_up_outside(eq):
            needs.append((SUMMANDS, COPIES))
        elif eq.name in CUSTOM_RULES:
            if not _is_linear(self.flow.bodies[eq][0], len(eq.outputs)):
                return []
            needs.append(tuple(SUMMANDS if _is_float(x) else COPIES for x in eq.inputs))
        elif eq.name == "dot_general":
            needs += [(SUMMANDS, COPIES), (COPIES, SUMMANDS)]
        elif eq.name in KEEPS_VALUES:
            needs.append((SUMMANDS,))
        elif eq.name in SUMS_OF_MANY:
            first_case = 1 if eq.name == "select_n" else 0
            floats = [_is_float(x) and i >= first_case for i, x in enumerate(eq.inputs)]
            needs.append(tuple(SUMMANDS if yes else COPIES for yes in floats))
        local = flow_alone(eq, self.flow)
        return [
            Way(tuple((h,) for h in each), (SUMMANDS,), None, local, from_full=True)
            for each in needs
        ]


def _is_by_rows(flow: DimsFlow, eq: Equation, atom: Atom) -> bool:
    """Return whether an equation computes rows from the same rows, wherever they are."""
    if eq.name not in CUSTOM_RULES and eq.name not in REMATS:
        return eq.name in BY_ROWS
    for body in flow.bodies.get(eq, ()):
        for inner in body.program.equations:
            constants = [x for x in inner.inputs if isinstance(x, Constant)]
            dims = [dim for x in constants for dim in body.of_operand(x)]
            if any(atom in atoms_in(dim) for dim in dims) or not _is_by_rows(body, inner, atom):
                return False
    return True


def _adds_up_outside(eq: Equation) -> bool:
    """Return whether a lookup outside of a table of summands gives what it gives in their sum."""
    fill = eq.params["fill_value"]
    return fill is None or bool(np.isnan(fill)) or fill == 0


def _is_linear(body: DimsFlow, num_results: int) -> bool:
    """Return whether the forward program of a derivative of the model's own is linear in its
    floating input, as a sort of rows is, and keeps nothing of it for backward."""
    of_input = {v for v in body.program.inputs if v.is_float}
    for eq in body.program.equations:
        if of_input.isdisjoint(eq.values):
            continue
        is_lookup = eq.name == "gather" and eq.inputs[1] not in of_input and _adds_up_outside(eq)
        if not is_lookup and eq.name not in LINEAR | KEEPS_VALUES:
            return False
        of_input.update(eq.outputs)
    results, kept = body.program.outputs[:num_results], body.program.outputs[num_results:]
    return of_input.issuperset(results) and of_input.isdisjoint(kept)


def _is_float(operand: Operand) -> bool:
    if isinstance(operand, Value):
        return operand.is_float
    return is_float(jnp.result_type(operand.value))


def _likeness_of(operand: Operand, made_by: dict[Value, Equation], steps: int = 0) -> Hashable:
    """Return a key that is equal for values that are computed alike from the same values."""
    if isinstance(operand, Constant):
        value = np.asarray(operand.value)
        return (str(value.dtype), value.shape, value.tobytes()) if value.size == 1 else operand
    eq = made_by.get(operand)
    if eq is None or eq.has_effects or steps == _MOST_STEPS:
        return operand
    inputs = tuple(_likeness_of(x, made_by, steps + 1) for x in eq.inputs)
    return likeness(eq), inputs, eq.outputs.index(operand)
