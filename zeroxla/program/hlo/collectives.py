"""Lists the collectives of an HLO module, with their shapes, groups and runs per step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

from zeroxla.program.hlo.replica_groups import lists, replica_groups
from zeroxla.program.hlo.text import Instruction, Module, Shape
from zeroxla.program.hlo.trip_counts import trip_count

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Other instructions that communicate. zeroxla emits none. Skipping one would falsify a report.
_UNREAD_KINDS = ("ragged-all-to-all", "collective-broadcast", "send")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective instruction, reached along one chain of callers.

    Attributes:
      kind: one of `KINDS`. A pair of an asynchronous start and its done is one collective.
      name: the instruction's name in the text.
      op_name: its `jax.named_scope` path, below the paths of its callers.
      operands, results: the arrays that one device passes in and gets out. A collective that the
        compiler combined has several.
      groups: the device groups, as positions in the mesh's flat device order; () means one group
        of all devices.
      pairs: (source, target) positions of a collective-permute; () for other kinds.
      count: runs per step: the product of the trip counts of all loops around it. It is an upper
        bound inside conditionals, because every branch counts as taken.
      branches: the branches of conditionals that it is in, outermost first: (number of the
        conditional, which branch).
      asynchronous: whether the compiler split it into a start and a done.
    """

    kind: str
    name: str
    op_name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    count: int
    branches: tuple[tuple[int, int], ...]
    asynchronous: bool


def collectives(module: Module, *, while_trips: int | None = None) -> tuple[Collective, ...]:
    """List every collective that one run of the program may execute.

    Args:
      module: from `parse`.
      while_trips: the number of trips to assume for loops whose trip count depends on data.

    Returns:
      Collectives in program order. A computation that is called from several places gives an entry
      for each. The collectives of all branches are there, and `branches` says which is where.

    Raises:
      ValueError: a loop that holds collectives has no fixed trip count and `while_trips` is None.
      NotImplementedError: there is a collective whose bytes this reader does not know.
    """

    @functools.cache
    def communicates(computation: str) -> bool:
        return any(
            _kind(instruction) is not None or any(map(communicates, instruction.called))
            for instruction in module.computations.get(computation, {}).values()
        )

    conditionals = itertools.count()

    def visit(
        computation: str, path: str, count: int, branches: tuple[tuple[int, int], ...]
    ) -> Iterator[Collective]:
        if not communicates(computation):
            return
        scope = module.computations[computation]
        for instruction in scope.values():
            # The start carries the shapes; a done or update may name the same computation again.
            if instruction.opcode.endswith(("-done", "-update")):
                continue
            if kind := _kind(instruction):
                yield _collective(kind, instruction, scope, path, count, branches)
            elif any(map(communicates, instruction.called)):
                inner_path = _join(path, instruction.op_name)
                if instruction.opcode == "while":
                    trips = trip_count(instruction, scope, module)
                    if trips is None:
                        trips = while_trips
                    if trips is None:
                        raise ValueError(
                            f"the loop {instruction.name!r} (op_name {instruction.op_name!r}) "
                            "holds collectives but its trip count depends on data; pass "
                            "while_trips=N to count it as N trips"
                        )
                    body, condition = (instruction.attribute(k) for k in ("body", "condition"))
                    yield from visit(body or "", inner_path, count * trips, branches)
                    yield from visit(condition or "", inner_path, count * (trips + 1), branches)
                elif instruction.opcode == "conditional":
                    which = next(conditionals)
                    for branch, name in enumerate(instruction.called):
                        inner = (*branches, (which, branch))
                        yield from visit(name, inner_path, count, inner)
                else:
                    for name in instruction.called:
                        yield from visit(name, inner_path, count, branches)

    return tuple(visit(module.entry, "", 1, ()))


def _kind(instruction: Instruction) -> str | None:
    """Return the kind of collective that an instruction is or starts; None for every other one.

    Raises:
      NotImplementedError: it communicates in a way that this reader does not know.
    """
    kind = instruction.opcode.removesuffix("-start")
    # A GPU option turns permutes into sends and receives; those of the host carry no pairs.
    if kind == "send" and "_xla_send_recv_source_target_pairs" not in instruction.rest:
        return None
    if kind in _UNREAD_KINDS:
        raise NotImplementedError(
            f"{instruction.name!r} is a {kind!r}, whose bytes this reader does not know; "
            f"it knows {', '.join(KINDS)}"
        )
    return kind if kind in KINDS else None


def _collective(
    kind: str,
    instruction: Instruction,
    scope: dict[str, Instruction],
    path: str,
    count: int,
    branches: tuple[tuple[int, int], ...],
) -> Collective:
    operands = tuple(shape for name in instruction.operands for shape in scope[name].shapes)
    results = instruction.shapes
    asynchronous = instruction.opcode.endswith("-start")
    # A start returns (operands, results, context...), except older all-reduce-starts: results only.
    if asynchronous and len(results) >= 2 * len(operands):
        results = results[len(operands) : 2 * len(operands)]
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
    return Collective(
        kind=kind,
        name=instruction.name,
        op_name=_join(path, instruction.op_name),
        operands=operands,
        results=results,
        groups=replica_groups(instruction.attributes),
        pairs=tuple((a, b) for a, b in lists(pairs.group(1))) if pairs else (),
        count=count,
        branches=branches,
        asynchronous=asynchronous,
    )


def _join(path: str, op_name: str) -> str:
    # Compiled programs hold absolute paths; in lowered ones a callee's is relative to its call.
    if not path or (op_name and op_name.split("/")[0] == path.split("/")[0]):
        return op_name
    return f"{path}/{op_name}" if op_name else path
