"""Banks of experts in a program: leaves whose products are done one by one along some dim."""

from __future__ import annotations

from zeroxla.split.atoms import Atom, atoms_in
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.expert_rules import group_dims


def experts_of(flow: DimsFlow) -> frozenset[Atom]:
    """Return the classes along which products of leaves are done one by one."""
    found: set[Atom] = set()
    for eq in flow.program.equations:
        for body in flow.bodies.get(eq, ()):
            found |= experts_of(body)
        if (known := group_dims(eq)) is not None and flow.made_of_leaves(eq.inputs[1]):
            found.update(atoms_in(flow.of_operand(eq.inputs[1])[known[1]]))
        if eq.name == "dot_general":
            _, batch = eq.params["dimension_numbers"]
            for x, dims in zip(eq.inputs, batch, strict=True):
                if flow.made_of_leaves(x):
                    found.update(a for d in dims for a in atoms_in(flow.of_operand(x)[d]))
    return frozenset(found)
