"""`Resident`: an array that a device holds for a while, with its name and the model's line."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from zeroxla.program import compat
from zeroxla.program.live.kinds import ACTIVATIONS, GATHERED, OTHERS, RESIDUALS, kind_of
from zeroxla.program.live.leaf_flow import LeafFlow
from zeroxla.program.live.liveness import Scope, carry_of, size_of
from zeroxla.program.phases import PHASES, phase_of
from zeroxla.program.primitives import HLO_KINDS, LOOPS, RENAMES
from zeroxla.program.trace import Equation, Operand, Program, Value
from zeroxla.program.walk import bodies, scope_path

_NOT_THE_MODELS = {word for phase in PHASES for word in phase.split()} | LOOPS | {"cond"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """An array of a device, or several that are alike: made by one line, in layers that differ.

    Attributes:
      kind: the part of the memory that it belongs to, such as "residuals".
      equation: the primitive that makes it; empty for an array of the state.
      shape: its dtype and the shape that the device has, such as "float32[8,128]".
      scope: the scopes of the model that it is made in, such as "h_0/attn"; "h_*/attn" of several.
      line: "folder/file.py:line" of the model; empty if it is not known.
      leaves: the leaves that it is gathered from, whose gradient it is, or that it is itself.
      unit: the unit that these leaves are gathered with; empty if there is none.
      num_bytes: its bytes; of several arrays, of all.
      count: the number of arrays.
    """

    kind: str
    equation: str
    shape: str
    scope: str = ""
    line: str = ""
    leaves: tuple[str, ...] = ()
    unit: str = ""
    num_bytes: int
    count: int = 1

    @property
    def name(self) -> str:
        """What it is, in words: its leaves, or its equation and the scope of that."""
        first, num = next(iter(self.leaves), ""), len(self.leaves)
        if first:
            is_gradient = bool(self.equation) and self.kind != GATHERED
            more = f" and {num - 1} more" if num > 1 else ""
            return ("gradient of " if is_gradient else "") + first + more
        return " in ".join(filter(None, (self.equation, self.scope))) or self.kind


def largest_first(found: Mapping[Resident, int]) -> list[Resident]:
    """Return residents, those that are alike as one, the largest first.

    Args:
      found: the bytes by label; a label has the bytes of one array.
    """
    groups: dict[Resident, list[Resident]] = {}
    for label, num_bytes in found.items():
        if num_bytes > 0:
            count = max(1, round(num_bytes / max(1, label.num_bytes)))
            one = dataclasses.replace(label, num_bytes=num_bytes, count=count)
            alike = label if label.leaves else dataclasses.replace(label, scope=_any(label.scope))
            groups.setdefault(alike, []).append(one)
    merged = [
        dataclasses.replace(
            alike if len(ones) > 1 else ones[0],
            num_bytes=sum(one.num_bytes for one in ones),
            count=sum(one.count for one in ones),
        )
        for alike, ones in groups.items()
    ]
    return sorted(merged, key=lambda resident: -resident.num_bytes)


def _any(scope: str) -> str:
    return re.sub(r"\d+", "*", scope)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResidentLabels:
    """Labels the values of one program: each label is a `Resident` of one array.

    Attributes:
      flow: the leaves that the values come from and go to.
      leaf_names: the names of the leaves.
      units: the unit of each leaf.
      around: the path of the scopes around the program.
    """

    flow: LeafFlow
    leaf_names: Sequence[str]
    units: Sequence[str]
    around: str = ""

    def of(self, eq: Equation, path: str, scope: Scope) -> Sequence[Resident | None]:
        """Return a label for each result of an equation; None if no result is in memory."""
        if eq.name not in LOOPS and scope.in_memory.isdisjoint(eq.outputs):
            return [None] * len(eq.outputs)
        kind = kind_of(eq, path)
        if kind != ACTIVATIONS:
            kinds = [kind] * len(eq.outputs)
        elif _is_backward(eq, path):
            kinds = [OTHERS] * len(eq.outputs)
        else:
            kinds = [RESIDUALS if self._waits(v, scope) else OTHERS for v in eq.outputs]
        return [
            self._label(v, k, origin, where)
            for v, k, (origin, where) in zip(eq.outputs, kinds, _origins(eq, path), strict=True)
        ]

    def waiting(self, eq: Equation, path: str) -> Resident:
        """Return the label of a collective's operands."""
        kind = kind_of(eq, path)
        return self._label(eq.values[0], OTHERS if kind == ACTIVATIONS else kind, eq, path)

    def kind(self, label: Resident) -> str:
        """Return the kind of a label."""
        return label.kind

    def inside(self, eq: Equation, body: Program, path: str) -> ResidentLabels:
        """Return the labels of the program of a loop or a branch."""
        return dataclasses.replace(self, flow=self.flow.inside(eq, body, path), around=path)

    def _waits(self, value: Value, scope: Scope) -> bool:
        """Return whether backward is what reads a value last."""
        equations = scope.program.equations
        last = scope.last_use.get(scope.roots.get(value, value), len(equations))
        if last >= len(equations):
            return False
        reader = equations[last]
        return _is_backward(reader, scope_path(reader, self.around))

    def _label(self, value: Value, kind: str, eq: Equation, path: str) -> Resident:
        flow = self.flow.sources if kind == GATHERED else self.flow.targets
        leaves = () if kind == RESIDUALS else sorted(flow.get(value, ()))
        return Resident(
            kind=kind,
            equation=eq.name,
            shape=value.aval.str_short(),
            scope=scope_of(path),
            line=compat.model_line(eq.source),
            leaves=tuple(self.leaf_names[i] for i in leaves),
            unit=", ".join(dict.fromkeys(filter(None, (self.units[i] for i in leaves)))),
            num_bytes=size_of(value),
        )


def _is_backward(eq: Equation, path: str) -> bool:
    phase = phase_of(path, HLO_KINDS.get(eq.name, ""))
    return phase.startswith("backward") or phase == "reduce"


def _origins(eq: Equation, path: str) -> Iterable[tuple[Equation, str]]:
    """Return the equation that makes each result, and its path; of a loop's result, the equation of
    its body that makes the last carry or one slice of what is stacked; of a carry that is stacked,
    the one that makes the next."""
    if eq.name not in LOOPS:
        return [(eq, path)] * len(eq.outputs)
    ((body, _),) = bodies(eq)
    makers = {v: (inner, i) for inner in body.equations for i, v in enumerate(inner.outputs)}
    found = []
    deeper: dict[Equation, Sequence[tuple[Equation, str]]] = {}
    first, num_carry = carry_of(eq)
    first -= eq.params.get("cond_nconsts", 0)
    carries = body.inputs[first : first + num_carry]
    into = dict(zip(carries, body.outputs[:num_carry], strict=True))

    def made(out: Operand) -> Operand:
        """Return what a value is another name of."""
        while isinstance(out, Value) and out in makers and makers[out][0].name in RENAMES:
            inner, i = makers[out]
            out = inner.inputs[i if inner.name == "optimization_barrier" else 0]
        return out

    for out in map(made, body.outputs):
        if isinstance(out, Value) and out in into:
            out = made(into[out])
        if not isinstance(out, Value) or out not in makers:
            found.append((eq, path))
            continue
        inner, i = makers[out]
        if inner not in deeper:
            deeper[inner] = list(_origins(inner, scope_path(inner, path)))
        found.append(deeper[inner][i])
    return found


def scope_of(path: str) -> str:
    """Return the model's own scopes of a path, without phases, transforms, methods and einsums."""
    own = [x for x in path.split("/")[:-1] if re.fullmatch(r"\w+", x) and x not in _NOT_THE_MODELS]
    return "/".join(own)


def by_kind(residents: Iterable[Resident]) -> Counter[str]:
    """Return the bytes of residents by kind."""
    found: Counter[str] = Counter()
    for resident in residents:
        found[resident.kind] += resident.num_bytes
    return found
