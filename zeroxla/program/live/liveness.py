"""Which values of a traced program exist in memory, and until when, after the fusions that any
compiler makes.

An equation that computes element by element is fused into the equations that read its result. That
result exists in memory only if something must read it from there: a product, a collective, a loop
or the caller. Until it is read, the operands of the fused equation stay alive. Equations that only
rename (a reshape, a barrier) share memory with their operand. A loop's carry has one place: the
result of the loop lies where the first value was. `peak.py` adds up what this file finds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from zeroxla.program.host_values import is_value_on_host
from zeroxla.program.primitives import EXPENSIVE, FUSED, RENAMES, RUN_BESIDE, WRITES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value


def size_of(value: Value) -> int:
    """Return the bytes of a value."""
    return int(value.aval.size * getattr(value.aval.dtype, "itemsize", 8))


def carry_of(eq: Equation) -> tuple[int, int]:
    """Return the position of a loop's first carry among its inputs, and how many carries it has;
    (0, 0) for an equation that is no loop."""
    if eq.name == "scan":
        scan = Scan(eq)
        return scan.num_consts, scan.num_carry
    if eq.name == "while":
        return eq.params["cond_nconsts"] + eq.params["body_nconsts"], len(eq.outputs)
    return 0, 0


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The values of one program.

    A value that is not in `roots` is a root: it has memory of its own, if it has any.

    Attributes:
      program: the program. The bodies of its loops and branches are scopes of their own.
      roots: the root of each value that shares the memory of another.
      last_use: the number of the equation that reads each root last.
      in_memory: the roots that exist in the device's memory and were made by this program.
      platform: the platform that the program is compiled for.
    """

    program: Program
    roots: Mapping[Value, Value]
    last_use: Mapping[Value, int]
    in_memory: frozenset[Value]
    platform: str

    @staticmethod
    def of(program: Program, platform: str, *, late: bool = True) -> Scope:
        """Find out which values exist, and until when.

        Args:
          program: a traced program.
          platform: the platform that it is compiled for.
          late: move equations whose results are larger than their operands, such as gathers, to
            just before their first use. Compilers that save memory order them so.
        """
        program = _late(program) if late else program
        roots = _roots(program)
        last_use, in_memory = _uses(program, roots, platform)
        made_here = in_memory.difference(program.inputs)
        on_device = frozenset(value for value in made_here if not is_value_on_host(value))
        return Scope(program, roots, last_use, on_device, platform)


def _late(program: Program) -> Program:
    """Return the program with growing equations moved to their first use; see `Scope.of`."""
    place: dict[Value, int] = {}
    order: list[tuple[int, int, Equation]] = []
    for i in reversed(range(len(program.equations))):
        eq = program.equations[i]
        first = min((place[v] for v in eq.outputs if v in place), default=i)
        grows = sum(map(size_of, eq.outputs)) > sum(map(size_of, eq.values))
        when = first if grows or eq.name in RENAMES or eq.name in FUSED else i
        order.append((when, i, eq))
        for value in eq.values:
            place[value] = min(place.get(value, when), when)
    moved = tuple(eq for *_, eq in sorted(order, key=lambda item: item[:2]))
    return dataclasses.replace(program, equations=moved)


def _roots(program: Program) -> dict[Value, Value]:
    """Return the root of each value that shares the memory of another.

    A renamed value shares its operand's memory. A loop's result takes the place of the carry that
    went in, unless something besides the loop reads that carry.
    """
    roots: dict[Value, Value] = {}
    num_readers: Counter[Operand] = Counter(v for eq in program.equations for v in set(eq.values))
    num_readers.update(v for v in program.outputs if isinstance(v, Value))
    shared = set(program.inputs)
    for eq in program.equations:
        if eq.name in RENAMES:
            for out, operand in zip(eq.outputs, eq.inputs, strict=False):
                if (root := _root(operand, roots)) is not None:
                    roots[out] = root
                    if num_readers[operand] > 1:
                        shared.add(root)
        first, num_carry = carry_of(eq)
        for start, out in zip(eq.inputs[first:][:num_carry], eq.outputs, strict=False):
            root = _root(start, roots)
            if root is not None and num_readers[start] == 1 and root not in shared:
                roots[out] = root
    return roots


def _root(operand: Operand, roots: Mapping[Value, Value]) -> Value | None:
    """Return the root of a value; None for a constant."""
    return roots.get(operand, operand) if isinstance(operand, Value) else None


def _uses(
    program: Program, roots: Mapping[Value, Value], platform: str
) -> tuple[dict[Value, int], set[Value]]:
    """Return the number of the equation that reads each root last, and the roots in memory, inputs
    included.

    The walk goes backwards: whether a fused equation's result is in memory depends on its readers.
    """
    last_use: dict[Value, int] = {}
    in_memory: set[Value] = set()
    first_read = _first_reads(program)
    num_readers = Counter(
        _root(v, roots)
        for eq in program.equations
        if eq.name not in RENAMES
        for v in set(eq.values)
    )

    def read(operands: Iterable[Operand], when: int, *, from_memory: bool) -> None:
        for operand in operands:
            if (root := _root(operand, roots)) is not None:
                last_use[root] = max(last_use.get(root, -1), when)
                if from_memory:
                    in_memory.add(root)

    read(program.outputs, len(program.equations), from_memory=True)
    for i in reversed(range(len(program.equations))):
        eq = program.equations[i]
        if eq.name in FUSED:
            for out in eq.outputs:
                if eq.name in EXPENSIVE and num_readers[out] > 1:
                    in_memory.add(out)
                # It is computed when it is read, so its operands must still be there then.
                when = i if out in in_memory else last_use.get(out, i)
                read(eq.inputs, when, from_memory=False)
        elif eq.name not in RENAMES:
            when = i
            if eq.name in RUN_BESIDE and platform == "gpu":
                when = min((first_read.get(v, i) for v in eq.outputs), default=i)
            read(eq.inputs, when, from_memory=eq.name not in WRITES)
            in_memory.update(eq.outputs)
    return last_use, in_memory


def _first_reads(program: Program) -> dict[Value, int]:
    """Return the number of the equation that reads each value first."""
    first_read: dict[Value, int] = {}
    for i, eq in enumerate(program.equations):
        for value in eq.values:
            first_read.setdefault(value, i)
    return first_read
