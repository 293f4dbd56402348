"""`Origins`: names the events of a simulated step by the leaves that travel and the model's lines.

A collective that brings leaves is named by them, by their unit, and by the line of the model that
reads them first; one that reduces gradients by the leaves and by the line that makes the gradient.
Everything else is named by its own line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zeroxla.planning.target import Target
from zeroxla.planning.work import Work
from zeroxla.program import compat
from zeroxla.program.live.leaf_flow import LeafFlow
from zeroxla.program.live.liveness import size_of
from zeroxla.program.live.residents import scope_of
from zeroxla.program.phases import phase_of
from zeroxla.program.primitives import CUTS_OR_JOINS, HLO_KINDS, PASSED, RENAMES
from zeroxla.program.trace import Equation, Operand, Program, Value
from zeroxla.program.walk import scope_path

COMPUTE_BOUND, MEMORY_BOUND = "compute", "memory"
_PASSES_ON = RENAMES | CUTS_OR_JOINS | PASSED | frozenset(HLO_KINDS)
_MOST_SHOWN = 72


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What an event of a step is of.

    Attributes:
      phase: one of `zeroxla.program.phases.PHASES`.
      kind: the HLO kind of a collective; empty for other events.
      text: the equation with the shapes of its operands and results, shortened.
      scope: the scopes of the model, such as "h_0/attn".
      line: "folder/file.py:line" of the model; empty if it is not known.
      leaves: the leaves that travel.
      unit: the unit that these leaves are gathered with; empty if there is none.
      num_bytes: the bytes of a collective's result, if it gathers, or of its operands.
      num_elements: the elements of the same arrays.
      bound: what limits a computation: `COMPUTE_BOUND` or `MEMORY_BOUND`; empty for other events.
      dims: the dims of the arrays that a computation reads and makes, such as "8,128".
    """

    phase: str
    kind: str = ""
    text: str = ""
    scope: str = ""
    line: str = ""
    leaves: tuple[str, ...] = ()
    unit: str = ""
    num_bytes: int = 0
    num_elements: int = 0
    bound: str = ""
    dims: frozenset[str] = frozenset()


@dataclasses.dataclass(kw_only=True, slots=True)
class Origins:
    """Names the events of one program; see `EventNames`.

    Attributes:
      target: says what limits a computation.
      flow: the leaves that the program's values come from and go to.
      leaf_names: the names of the leaves.
      units: the unit of each leaf.
      program: the program.
      around: the path of the scopes around it.
    """

    target: Target
    flow: LeafFlow
    leaf_names: Sequence[str]
    units: Sequence[str]
    program: Program
    around: str = ""
    _known: dict[int, Origin] = dataclasses.field(default_factory=dict)
    _inner: dict[int, Origins] = dataclasses.field(default_factory=dict)
    _partners: Mapping[int, Equation] | None = None

    def of(self, eq: Equation, path: str, work: Work | None) -> Origin:
        """Return the origin of what an equation does."""
        if id(eq) not in self._known:
            self._known[id(eq)] = self._computed(eq, path, work) if work else self._moved(eq, path)
        return self._known[id(eq)]

    def inside(self, eq: Equation, body: Program, path: str) -> Origins:
        """Return the names for the program of a loop or a branch, the same ones each time."""
        if id(body) not in self._inner:
            flow = self.flow.inside(eq, body, path)
            self._inner[id(body)] = dataclasses.replace(
                self,
                flow=flow,
                program=body,
                around=path,
                _known={},
                _inner={},
                _partners=None,
            )
        return self._inner[id(body)]

    def _computed(self, eq: Equation, path: str, work: Work) -> Origin:
        phase = phase_of(path, "")
        of_model = phase in ("forward", "backward")
        in_memory = self.target.memory_s(work.num_bytes) > self.target.products_s(work)
        return Origin(
            phase=phase,
            text=text_of(eq),
            scope=scope_of(path),
            line=compat.model_line(eq.source) if of_model else "",
            bound=MEMORY_BOUND if in_memory else COMPUTE_BOUND,
            dims=frozenset(",".join(map(str, v.aval.shape)) for v in (*eq.values, *eq.outputs)),
        )

    def _moved(self, eq: Equation, path: str) -> Origin:
        kind = HLO_KINDS.get(eq.name, "")
        phase = phase_of(path, kind)
        flow = self.flow.sources if phase.endswith("gather") else self.flow.targets
        values = eq.outputs if kind == "all-gather" else eq.values
        leaves = sorted({i for v in (*eq.outputs, *eq.values) for i in flow.get(v, ())})
        if self._partners is None:
            self._partners = _partners(self.program)
        partner = self._partners.get(id(eq), eq if phase in ("forward", "backward") else None)
        where = "" if partner is None else scope_path(partner, self.around)
        return Origin(
            phase=phase,
            kind=kind,
            text=text_of(eq),
            scope=scope_of(where),
            line=compat.model_line(partner.source) if partner else "",
            leaves=tuple(self.leaf_names[i] for i in leaves),
            unit=", ".join(dict.fromkeys(filter(None, (self.units[i] for i in leaves)))),
            num_bytes=sum(map(size_of, values)),
            num_elements=sum(v.aval.size for v in values),
        )


def text_of(eq: Equation) -> str:
    """Return an equation with the shapes of its operands and results, at most 72 letters."""
    given = " ".join(x.aval.str_short() for x in eq.values)
    made = " ".join(x.aval.str_short() for x in eq.outputs)
    text = f"{eq.name} {given} -> {made}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _partners(program: Program) -> dict[int, Equation]:
    """Return, by the identity of a collective, the model's equation that it works for: the first
    one that reads what it brings, or the last one that makes what it reduces."""
    found: dict[int, Equation] = {}
    waiting: dict[Operand, list[Equation]] = {}
    for eq in program.equations:
        carried = list({id(c): c for v in eq.values for c in waiting.get(v, ())}.values())
        if eq.name in HLO_KINDS:
            carried.append(eq)
        if eq.name in _PASSES_ON:
            _give(waiting, eq, carried)
        else:
            for collective in carried:
                found.setdefault(id(collective), eq)
    makers = {v: eq for eq in program.equations for v in eq.outputs}
    for eq in program.equations:
        if HLO_KINDS.get(eq.name) in ("reduce-scatter", "all-reduce", "all-to-all"):
            maker = _maker(eq.values, makers)
            if maker is not None and not _is_gather(eq):
                found[id(eq)] = maker
    return found


def _give(waiting: dict[Operand, list[Equation]], eq: Equation, carried: list[Equation]) -> None:
    """Hand on what an equation passes on: one to one through a barrier, otherwise all to all."""
    if eq.name == "optimization_barrier":
        for given, out in zip(eq.inputs, eq.outputs, strict=True):
            waiting[out] = list(waiting.get(given, ()))
        return
    for out in eq.outputs:
        waiting[out] = carried


def _maker(values: Iterable[Operand], makers: Mapping[Value, Equation]) -> Equation | None:
    """Return the equation behind casts, cuts and the like that makes the first of some values."""
    found = None
    operand = next(iter(values), None)
    while isinstance(operand, Value) and operand in makers:
        found = makers[operand]
        if found.name not in _PASSES_ON:
            return found
        if found.name == "optimization_barrier":
            operand = found.inputs[found.outputs.index(operand)]
        else:
            operand = next(iter(found.values), None)
    return None


def _is_gather(eq: Equation) -> bool:
    return phase_of(scope_path(eq, ""), HLO_KINDS.get(eq.name, "")).endswith("gather")
