"""Pins: what a user says about leaves and arrays, as holdings that a search must take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from zeroxla.config.splits import SplitPin
from zeroxla.program.primitives import REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Value
from zeroxla.split.atoms import Atom, Dim, atoms_in, together
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, WHOLE, Holding, part
from zeroxla.split.prices import can_be_given

_MOST_NAMED = 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PinsOfAxis:
    """Resolves the pins of one axis in a program.

    Attributes:
      flow: the flow through the program.
      role: what may be split along the axis.
      parts: the length of the axis.
    """

    flow: DimsFlow
    role: AxisRole
    parts: int

    def leaf(self, value: Value, path: str, pin: SplitPin) -> Holding:
        """Return the holding of a pinned leaf.

        Raises:
          ValueError: the leaf cannot be split so.
        """
        if pin.dim is None:
            return COPIES
        able = self._able(self.flow, value)
        if self.role.name == "context":
            able = {}
        if self.role.name == "expert":
            able = {d: [a for a in atoms if a in self.role.experts] for d, atoms in able.items()}
        able = {
            d: given
            for d, atoms in able.items()
            if (given := [a for a in atoms if can_be_given(self.flow, value, part(d, a))])
        }
        dim = _place(pin.dim, len(value.aval.shape))
        if dim not in able:
            raise ValueError(self._refusal(pin, f"the leaf {path!r}", value, able))
        return part(dim, able[dim][0])

    def in_bodies(self, holdings: Mapping[Value, Holding]) -> dict[Value, Holding]:
        """Return the holdings of pinned leaves, and of the inputs of loops and `jax.checkpoint`
        bodies that they are."""
        found: dict[Value, Holding] = {}

        def walk(flow: DimsFlow, known: Mapping[Value, Holding]) -> None:
            found.update(known)
            for eq in flow.program.equations:
                if eq.name == "scan" or eq.name in REMATS:
                    (body,) = flow.bodies[eq]
                    first_x = Scan(eq).first_x if eq.name == "scan" else len(eq.inputs)
                    inside = {
                        v: known[x] if i < first_x else known[x].moved(-1)
                        for i, (v, x) in enumerate(zip(body.program.inputs, eq.inputs, strict=True))
                        if isinstance(x, Value) and x in known
                    }
                    walk(body, inside)

        walk(self.flow, holdings)
        return found

    def arrays(
        self, pins: Sequence[SplitPin], *, all_match: bool
    ) -> dict[Value, tuple[Holding, ...]]:
        """Return the holdings that pinned arrays may have.

        Args:
          pins: the pins of arrays.
          all_match: whether each pin must match something.

        Raises:
          ValueError: an array cannot be split so, two pins contradict each other, or one matches
            nothing.
        """
        found: dict[Value, tuple[Holding, ...]] = {}
        pinned: dict[Value, SplitPin] = {}
        for pin in pins:
            matching = list(_matching(self.flow, pin, ""))
            if not matching and all_match:
                raise ValueError(
                    f"{pin} matches no array: no array of the loss is named so by "
                    "checkpoint_name, and none leaves such a scope. There are "
                    f"{', '.join(_names(self.flow))}; use one of them, or leave the pin out"
                )
            for flow, value in matching:
                other = pinned.setdefault(value, pin)
                if other.dim != pin.dim:
                    raise ValueError(
                        f"{pin} and {other} both match an array {value.aval.str_short()}; make "
                        "one of the expressions narrower"
                    )
                found[value] = self._of_array(flow, value, pin)
        return found

    def _of_array(self, flow: DimsFlow, value: Value, pin: SplitPin) -> tuple[Holding, ...]:
        if pin.dim is None:
            return (COPIES if flow.made_of_leaves(value) else WHOLE,)
        able, dim = self._able(flow, value), _place(pin.dim, len(value.aval.shape))
        if not able.get(dim):
            raise ValueError(self._refusal(pin, "an array that it matches", value, able))
        return tuple(part(dim, atom) for atom in able[dim])

    def _able(self, flow: DimsFlow, value: Value) -> dict[int, list[Atom]]:
        """Return by dim the classes along which an array can be split."""
        found = {d: self._classes(dim) for d, dim in enumerate(flow.dims[value])}
        return {d: atoms for d, atoms in found.items() if atoms}

    def _classes(self, dim: Dim) -> list[Atom]:
        sets = together((dim,))
        return [
            atom
            for atom in dict.fromkeys(atoms_in(dim))
            if atom.size % self.parts == 0
            and not atom.is_loop
            and self.role.allows_class(atom)
            and all(atom in each for each in sets)
        ]

    def _refusal(
        self, pin: SplitPin, what: str, value: Value, able: Mapping[int, Sequence[Atom]]
    ) -> str:
        able = {d: atoms for d, atoms in able.items() if atoms}
        dims = ", ".join(map(str, able))
        possible = f"dim {dims} or None (whole)" if able else "None (whole)"
        return (
            f"{pin}: {self.role.name}={self.parts} cannot split dim {pin.dim} of {what}, "
            f"{value.aval.str_short()}; what can be pinned is {possible}"
        )


def _place(dim: int, rank: int) -> int:
    """Return a dim's number, counted from the start."""
    return dim + rank if dim < 0 else dim


def _scope(eq: Equation, outside: str) -> str:
    return "/".join(filter(None, (outside, str(eq.name_stack))))


def _matching(flow: DimsFlow, pin: SplitPin, outside: str) -> Iterator[tuple[DimsFlow, Value]]:
    """Yield the arrays that a pin matches, each with the flow that it is in."""
    equations = flow.program.equations
    inside = {eq for eq in equations if pin.finds(_scope(eq, outside))}
    read = {v for eq in equations if eq not in inside for v in eq.values}
    read |= {x for x in flow.program.outputs if isinstance(x, Value)}
    for eq in equations:
        named = eq.name == "name" and pin.finds(eq.params["name"])
        if eq.name != "optimization_barrier":
            yield from ((flow, v) for v in eq.outputs if named or (eq in inside and v in read))
        if eq not in inside and (eq.name == "scan" or eq.name in REMATS):
            (body,) = flow.bodies[eq]
            yield from _matching(body, pin, _scope(eq, outside))


def _names(flow: DimsFlow) -> list[str]:
    """Return some names and scopes of a program."""
    found: dict[str, None] = {}

    def walk(flow: DimsFlow, outside: str) -> None:
        for eq in flow.program.equations:
            scope = _scope(eq, outside)
            if eq.name == "name":
                found[repr(eq.params["name"])] = None
            elif scope:
                found[repr(scope)] = None
            if eq.name == "scan" or eq.name in REMATS:
                walk(flow.bodies[eq][0], scope)

    walk(flow, "")
    names = list(found)
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return [*names[:_MOST_NAMED], *more] or ["none"]
