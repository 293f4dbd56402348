"""`OriginFinder`: finds for a compiled program's collective what the traced step has it bring.

The compiler keeps a collective's phase, its axis and the sizes of its arrays. Of several that are
alike, such as those of equal layers, the first of the program is the first of the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.lanes import Event
from zeroxla.program import hlo
from zeroxla.program.live.residents import scope_of

_Key = tuple[str, str, int]


class OriginFinder:
    """Names collectives of one compiled program.

    Args:
      events: the events of the traced step, with an `Origin` each.
      leaf_shapes: the natural shapes of the leaves by name, for collectives of the update, which
        the compiler makes itself.
    """

    def __init__(self, events: Iterable[Event], leaf_shapes: Mapping[str, Sequence[int]]) -> None:
        self._known: dict[_Key, list[Origin]] = {}
        for event in events:
            what = event.what
            if isinstance(what, Origin) and what.kind:
                mine = self._known.setdefault((what.phase, event.lane, what.num_elements), [])
                if not any(what is other for other in mine):
                    mine.append(what)
        self._taken: Counter[_Key] = Counter()
        self._leaves: dict[tuple[int, ...], list[str]] = {}
        for name, shape in leaf_shapes.items():
            self._leaves.setdefault(_sides(shape), []).append(name)

    def __call__(self, collective: hlo.Collective, phase: str, lane: str) -> Origin:
        """Return what a collective of a phase on a lane brings."""
        arrays = collective.results if collective.kind == "all-gather" else collective.operands
        found = [
            origin
            for part in phase.split("+")
            for array in arrays
            if (origin := self._next((part, lane, array.num_elements))) is not None
        ]
        leaves = [name for origin in found for name in origin.leaves]
        if not found:
            shapes = (*collective.results, *collective.operands)
            leaves = next((x for s in shapes if (x := self._leaves.get(_sides(s.dims)))), [])
        first = found[0] if found else Origin(phase=phase)
        return Origin(
            phase=phase,
            kind=collective.kind,
            text=collective.name,
            scope=first.scope or scope_of(collective.op_name),
            line=first.line,
            leaves=tuple(dict.fromkeys(leaves)),
            unit=", ".join(dict.fromkeys(x.unit for x in found if x.unit)),
            num_bytes=sum(array.num_bytes for array in arrays),
            num_elements=sum(array.num_elements for array in arrays),
        )

    def _next(self, key: _Key) -> Origin | None:
        known = self._known.get(key)
        if not known:
            return None
        taken = min(self._taken[key], len(known) - 1)
        self._taken[key] += 1
        return known[taken]


def _sides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of a leaf's dims in a row of which transposes make no difference."""
    return tuple(sorted(n for n in shape if n > 1))
