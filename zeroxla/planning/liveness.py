"""How much memory a traced program takes: what is alive when, after the fusions that any compiler
makes.

An equation that computes element by element is fused into those that read it; its result exists
only if something else must read it from memory: a product, a collective, a loop, the caller. What
it reads stays alive until then. Equations that only rename (a reshape, a barrier) share memory with
what they rename. Loops own one turn's values, their carries and their stacked results: what goes
into a carry and comes out of it is one place. Of branches the largest counts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from jax import memory

from zeroxla.planning.wire_bytes import bodies, body_of
from zeroxla.program import compat
from zeroxla.program.primitives import ELEMENTWISE, EXPENSIVE, REDUCTIONS
from zeroxla.program.trace import Atom, Equation, Program, Value

RENAMES = frozenset(
    {
        *("optimization_barrier", "reshape", "squeeze", "expand_dims", "bitcast_convert_type"),
        *("name", "stop_gradient", "copy", "copy_p", "reduce_precision", "transpose"),
    }
)
FUSED = (ELEMENTWISE - RENAMES) | {
    *("broadcast_in_dim", "iota", "slice", "split", "rev", "pad", "dynamic_slice"),
    *("concatenate", "random_wrap", "random_unwrap", "random_bits", "threefry2x32"),
    *("random_fold_in", "random_split"),
}
WRITES = REDUCTIONS | {"dynamic_update_slice"}
"""They read what is fused into them, and write a result."""

BESIDE = frozenset({"reduce_scatter", "all_to_all"})
"""Collectives that on GPUs run beside what follows them, until their results are read: until then
their operands stay. What is gathered comes from shards, which stay anyway."""

OVERWRITES = FUSED | WRITES | {"cond", "scan", "while"}
"""Their results may take the place of what they read."""

KindOf = Callable[[Equation, str], str]


def size_of(value: Value) -> int:
    """Return the bytes of a value."""
    return int(value.aval.size * getattr(value.aval.dtype, "itemsize", 8))


def is_on_host(value: Value) -> bool:
    """Return whether a value is in the host's memory."""
    return getattr(value.aval, "memory_space", None) == memory.Space.Host


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The values of one program.

    Attributes:
      program: of which loops and branches are scopes of their own.
      roots: of a value that is a renamed one, that one.
      last_use: of each root, the number of the equation that reads it last.
      in_memory: the roots that exist in memory and were made here.
      platform: for which it is.
    """

    program: Program
    roots: Mapping[Value, Value]
    last_use: Mapping[Value, int]
    in_memory: frozenset[Value]
    platform: str

    @staticmethod
    def of(program: Program, platform: str, *, late: bool = True) -> Scope:
        """Find out what exists when.

        Args:
          program: traced.
          platform: for which it is.
          late: equations whose results are larger than what they read, such as gathers, run just
            before their first use, as compilers that save memory order them.
        """
        program = _late(program) if late else program
        roots: dict[Value, Value] = {}
        read_by: Counter[Atom] = Counter(v for eq in program.equations for v in set(eq.values))
        read_by.update(v for v in program.outputs if isinstance(v, Value))
        shared = set(program.inputs)

        def root(atom: Atom) -> Value | None:
            return roots.get(atom, atom) if isinstance(atom, Value) else None

        for eq in program.equations:
            if eq.name in RENAMES:
                for out, atom in zip(eq.outputs, eq.inputs, strict=False):
                    if (found := root(atom)) is not None:
                        roots[out] = found
                        if read_by[atom] > 1:
                            shared.add(found)
            first, num_carry = carry_of(eq)
            for start, out in zip(eq.inputs[first:][:num_carry], eq.outputs, strict=False):
                found = root(start)
                if found is not None and read_by[start] == 1 and found not in shared:
                    roots[out] = found
        end = len(program.equations)
        last: dict[Value, int] = {}
        in_memory: set[Value] = set()
        readers = Counter(
            root(v) for eq in program.equations if eq.name not in RENAMES for v in set(eq.values)
        )

        first_read: dict[Value, int] = {}
        for i, eq in enumerate(program.equations):
            for value in eq.values:
                first_read.setdefault(value, i)

        def read(atoms: Iterable[Atom], when: int, *, from_memory: bool) -> None:
            for atom in atoms:
                if (value := root(atom)) is not None:
                    last[value] = max(last.get(value, -1), when)
                    if from_memory:
                        in_memory.add(value)

        read(program.outputs, end, from_memory=True)
        for i in reversed(range(end)):
            eq = program.equations[i]
            if eq.name in RENAMES:
                continue
            if eq.name in FUSED:
                for out in eq.outputs:
                    if eq.name in EXPENSIVE and readers.get(out, 0) > 1:
                        in_memory.add(out)
                    # It is computed where it is read: what it reads must still be there.
                    when = i if out in in_memory else last.get(out, i)
                    read(eq.inputs, when, from_memory=False)
            else:
                when = i
                if eq.name in BESIDE and platform == "gpu":
                    when = min((first_read.get(v, i) for v in eq.outputs), default=i)
                read(eq.inputs, when, from_memory=eq.name not in WRITES)
                in_memory.update(eq.outputs)
        inputs = set(program.inputs)
        there = frozenset(v for v in in_memory - inputs if not is_on_host(v))
        return Scope(program, roots, last, there, platform)

    def peak(self, kind_of: KindOf = lambda eq, path: "", path: str = "") -> Counter[str]:
        """Return the bytes that values made here have when they have most, by their kind.

        Args:
          kind_of: (equation, path of its scopes) -> the kind of what it makes.
          path: of the scopes around the program.
        """
        ends: dict[int, list[Value]] = {}
        for value in self.in_memory:
            ends.setdefault(self.last_use.get(value, -1), []).append(value)
        kinds: dict[Value, str] = {}
        alive: Counter[str] = Counter()
        most: Counter[str] = Counter()

        def note(found: Counter[str]) -> None:
            nonlocal most
            if found.total() > most.total():
                most = found.copy()

        for i, eq in enumerate(self.program.equations):
            here = "/".join(filter(None, (path, str(eq.name_stack), eq.name)))
            mine = [v for v in eq.outputs if v in self.in_memory and v not in self.roots]
            kinds.update(dict.fromkeys(mine, kind_of(eq, here)))
            taken = [self.roots.get(v) for v in eq.outputs[: carry_of(eq)[1]]]
            taken = [v for v in taken if v in kinds]
            _add(alive, taken, kinds, -1)
            kinds.update(dict.fromkeys(taken, kind_of(eq, here)))
            _add(alive, taken, kinds, 1)
            gone = [v for v in ends.get(i, ()) if v in kinds]
            if eq.name in FUSED or eq.name in WRITES:  # Written over what it reads last.
                _add(alive, gone, kinds, -1)
                _add(alive, mine, kinds, 1)
                note(alive)
            else:
                _add(alive, mine, kinds, 1)
                note(alive + self._inside(eq, kind_of, here))
                _add(alive, gone, kinds, -1)
            dead = [v for v in mine if self.last_use.get(v, i) <= i and v not in gone]
            _add(alive, dead, kinds, -1)
        return most

    def _inside(self, eq: Equation, kind_of: KindOf, path: str) -> Counter[str]:
        """Return the bytes of what a loop or branch makes inside."""
        if eq.name == "cond":
            branches = map(body_of, compat.branches_for(eq.params, self.platform))
            found = (_branch(branch, self.platform).peak(kind_of, path) for branch in branches)
            return max(found, key=Counter.total)
        inside: Counter[str] = Counter()
        for body, _ in bodies(eq):
            inside += _turn(eq, body, self.platform).peak(kind_of, path)
            for late in _into_next_turn(eq, body) if self.platform == "gpu" else ():
                here = "/".join(filter(None, (path, str(late.name_stack), late.name)))
                inside[kind_of(late, here)] += sum(map(size_of, late.values))
        return inside


def _add(alive: Counter[str], values: Iterable[Value], kinds: Mapping[Value, str], n: int) -> None:
    for value in values:
        alive[kinds[value]] += n * size_of(value)


def _into_next_turn(eq: Equation, body: Program) -> list[Equation]:
    """Return the collectives of a turn that may run beside the next one.

    Nothing in the turn waits for what they give, which is stacked. Of several in a row it is the
    first, whose operands are there by then.
    """
    passed_on = (FUSED | RENAMES | BESIDE) - {"optimization_barrier"}
    wanted = {v for v in body.outputs[carry_of(eq)[1] :] if isinstance(v, Value)}
    chain = []
    for inner in reversed(body.equations):
        if inner.name in passed_on and not wanted.isdisjoint(inner.outputs):
            chain.append(inner)
            wanted.update(inner.values)
    behind: set[Value] = set()
    found = []
    for inner in reversed(chain):
        is_behind = not behind.isdisjoint(inner.values)
        if inner.name in BESIDE and not is_behind:
            found.append(inner)
        if is_behind or inner.name in BESIDE:
            behind.update(inner.outputs)
    return found


def carry_of(eq: Equation) -> tuple[int, int]:
    """Return where a loop's carry begins among its inputs, and how many arrays it has."""
    if eq.name == "scan":
        return compat.scan_counts(eq.params)
    if eq.name == "while":
        return eq.params["cond_nconsts"] + eq.params["body_nconsts"], len(eq.outputs)
    return 0, 0


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


def _branch(body: Program, platform: str) -> Scope:
    """Return a branch; its results are the conditional's own, which are counted outside."""
    scope = Scope.of(body, platform)
    results = {scope.roots.get(v, v) for v in body.outputs if isinstance(v, Value)}
    return dataclasses.replace(scope, in_memory=scope.in_memory - results)


def _turn(eq: Equation, body: Program, platform: str) -> Scope:
    """Return one turn of a loop. What it stacks goes where it belongs at once, and so does what it
    carries on, if what was carried in is no longer needed then."""
    first, num_carry = carry_of(eq)
    first -= eq.params.get("cond_nconsts", 0)
    carried, stacked = body.outputs[:num_carry], body.outputs[num_carry:]
    scope = Scope.of(dataclasses.replace(body, outputs=carried), platform)
    equations = scope.program.equations
    made = {v: i for i, eq in enumerate(equations) for v in eq.outputs}
    last = dict(scope.last_use)
    for value in (scope.roots.get(v, v) for v in stacked if isinstance(v, Value)):
        if value in made:
            last[value] = max(last.get(value, -1), made[value])
    in_place = set()
    for before, out in zip(body.inputs[first:], carried, strict=False):
        value = scope.roots.get(out, out) if isinstance(out, Value) else None
        if value in made:
            when = made[value] + (equations[made[value]].name in OVERWRITES)
            if last.get(before, -1) < when and before.aval.size == value.aval.size:
                in_place.add(value)
    return dataclasses.replace(scope, last_use=last, in_memory=scope.in_memory - in_place)
