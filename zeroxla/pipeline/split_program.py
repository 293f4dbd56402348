"""Splits a program in two: what some of its results need, and the rest.

The first part computes the wanted results, and hands on what the second part reads of it. The
second part computes the other results. No equation runs twice. A loop is split turn by turn: the
first part's loop carries what the wanted results need, and stacks what the second part's loop reads
in each turn. A barrier is split operand by operand.

A backward is split in this way into the gradients of its inputs and those of its leaves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax

from zeroxla.fetch.ties import tie
from zeroxla.pipeline.needs import (
    BARRIER,
    LoopNeeds,
    Made,
    body_of,
    equations_for,
    light_results,
    made_for,
    operands_of,
    talks,
)
from zeroxla.pipeline.products import before_last_products
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value, read, run

Env = dict[Value, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """A program in two parts.

    Attributes:
      program: the program.
      wanted, rest: the numbers of the results of the first and of the second part.
      first, second: the equations of the two parts. Of a loop or a barrier each may run a part.
      loops: the loops of which both parts may run a part.
      crossing: the values that the first part hands on.
      by_data: the platform, if collectives must be kept in order by data; see `tie`. Else None.
    """

    program: Program
    wanted: tuple[int, ...]
    rest: tuple[int, ...]
    first: Made
    second: Made
    loops: dict[Equation, SplitLoop]
    crossing: tuple[Value, ...]
    by_data: str | None

    @property
    def read_later(self) -> set[Value]:
        """The inputs of the program that the second part reads."""
        found = {v for eq, outs in self.second.items() for v in self.operands_later(eq, outs)}
        found |= {v for i in self.rest if isinstance(v := self.program.outputs[i], Value)}
        return found & set(self.program.inputs)

    def operands_later(self, eq: Equation, outs: Sequence[int]) -> list[Value]:
        """Return what an equation of the second part reads."""
        return self.loops[eq].read_later if eq in self.loops else operands_of(eq, outs)

    def run_first(self, env: Env) -> tuple[list[Any], list[Any]]:
        """Run the first part.

        Args:
          env: the arrays of the program's inputs; what is computed is added.

        Returns:
          The wanted results; and what the second part needs, a pytree.
        """
        stacks = []

        def loop(eq: Equation, here: Env) -> Env:
            found, stacked = self.loops[eq].run_first(here)
            stacks.append(stacked)
            return found

        self._run(self.first, env, loop)
        found = [read(env, self.program.outputs[i]) for i in self.wanted]
        return found, [[env[v] for v in self.crossing], stacks]

    def run_second(self, env: Env, handed_on: list[Any]) -> list[Any]:
        """Run the second part; return the other results.

        Args:
          env: the arrays of the program's inputs; what is computed is added.
          handed_on: what the first part has handed on.
        """
        values, stacks = handed_on
        env.update(zip(self.crossing, values, strict=True))
        stacked = dict(zip((eq for eq in self.first if eq in self.loops), stacks, strict=True))
        self._run(self.second, env, lambda eq, here: self.loops[eq].run_second(here, stacked[eq]))
        return [read(env, self.program.outputs[i]) for i in self.rest]

    def _run(self, made: Made, env: Env, run_loop: Callable[[Equation, Env], Env]) -> None:
        """Run equations. If collectives must be kept in order by data, each waits for the last."""
        latest: list[Any] = []
        for eq, outs in made.items():
            here = env
            in_order = self.by_data is not None and talks(eq, self.by_data)
            if in_order and latest:
                operands = list(dict.fromkeys(v for v in eq.values if v in env))
                tied, _ = tie([env[v] for v in operands], latest, by_data=True)
                here = {**env, **dict(zip(operands, tied, strict=True))}
            if eq in self.loops:
                found = run_loop(eq, here)
            elif eq.name == BARRIER and len(outs) < len(eq.outputs):
                kept = lax.optimization_barrier([read(here, eq.inputs[i]) for i in outs])
                found = dict(zip((eq.outputs[i] for i in outs), kept, strict=True))
            else:
                run([eq], here)
                found = {v: here[v] for v in eq.outputs}
            env.update(found)
            if in_order:
                latest = list(found.values())


@dataclasses.dataclass(frozen=True, eq=False)
class SplitLoop:
    """A loop in two parts, which make its turns in the same order.

    Attributes:
      scan: the loop.
      body: a turn in two parts.
      first, second: what each part makes.
      entries: the carries of the first part that the second part reads at the start of a turn, by
        number.
    """

    scan: Scan
    body: SplitProgram
    first: LoopNeeds
    second: LoopNeeds
    entries: tuple[int, ...]

    @staticmethod
    def make(
        scan: Scan, wanted: Sequence[int], rest: Sequence[int], by_data: str | None
    ) -> SplitLoop:
        """Split a loop.

        Args:
          scan: the loop.
          wanted, rest: the numbers of its results that the first part makes, and of those that are
            left to the second one.
          by_data: as in `SplitProgram`.
        """
        first, num = LoopNeeds.of(scan, frozenset(wanted)), scan.num_carry
        program = body_of(scan)
        carried = scan.split_inputs(program.inputs)[1]
        ys = tuple(sorted(i - num for i in rest if i >= num))
        carries = {i for i in rest if i < num}.difference(first.carries)
        while True:
            others = [*sorted(carries), *(num + i for i in ys)]
            body = split(program, first.results(scan), others, by_data)
            later = body.read_later
            more = {i for i, v in enumerate(carried) if v in later} - carries
            more = more.difference(first.carries)
            if not more:
                break
            carries |= more
        inputs = frozenset(i for i, v in enumerate(program.inputs) if v in later)
        return SplitLoop(
            scan=scan,
            body=body,
            first=first,
            second=LoopNeeds(tuple(sorted(carries)), ys, inputs),
            entries=tuple(i for i in first.carries if carried[i] in later),
        )

    @property
    def read_later(self) -> list[Value]:
        """The values that the second part reads, beside what the first one hands on."""
        return self.second.operands(self.scan)

    def run_first(self, env: Env) -> tuple[Env, Any]:
        """Run the first part; return its results, and what the second part reads of each turn."""
        carried = self.scan.split_inputs(self.body.program.inputs)[1]

        def turn(inside: Env, _: Any) -> tuple[list[Any], Any]:
            entries = [inside[carried[i]] for i in self.entries]
            found, handed_on = self.body.run_first(inside)
            return found, (entries, handed_on)

        return self._run(env, self.first, turn, None)

    def run_second(self, env: Env, stacked: Any) -> Env:
        """Run the second part on what the first one has stacked; return its results."""
        carried = self.scan.split_inputs(self.body.program.inputs)[1]

        def turn(inside: Env, handed_on: Any) -> tuple[list[Any], Any]:
            entries, values = handed_on
            inside.update(zip((carried[i] for i in self.entries), entries, strict=True))
            return self.body.run_second(inside, values), None

        return self._run(env, self.second, turn, stacked)[0]

    def _run(
        self,
        env: Env,
        needs: LoopNeeds,
        turn: Callable[[Env, Any], tuple[list[Any], Any]],
        stacked: Any,
    ) -> tuple[Env, Any]:
        """Run the loop with another turn: (arrays of the body's inputs, slice of what was stacked)
        -> (carries and slices of results, what to stack)."""
        scan, num = self.scan, len(needs.carries)
        inputs = self.body.program.inputs
        consts, _, xs = scan.split_inputs([i in needs.inputs for i in range(len(inputs))])
        names = scan.split_inputs(inputs)
        fixed = _read(env, scan.consts, names[0], consts)
        sliced = _read(env, scan.xs, names[2], xs)
        mine = [names[1][i] for i in needs.carries]

        def body(carry: list[Any], x: Any) -> tuple[list[Any], Any]:
            slices, handed_on = x
            inside = {**fixed, **dict(zip(mine, carry, strict=True))}
            inside.update(zip(sliced, slices, strict=True))
            found, more = turn(inside, handed_on)
            return found[:num], (found[num:], more)

        start = [read(env, scan.carry[i]) for i in needs.carries]
        last, (ys, more) = scan.run(body, start, (list(sliced.values()), stacked))
        carries, stacked_ys = scan.split_outputs(scan.equation.outputs)
        found = dict(zip((carries[i] for i in needs.carries), last, strict=True))
        found.update(zip((stacked_ys[i] for i in needs.ys), ys, strict=True))
        return found, more


def split(
    program: Program,
    wanted: Sequence[int],
    rest: Sequence[int],
    by_data: str | None = None,
    *,
    unknown: Collection[Value] = (),
    early: bool = False,
) -> SplitProgram:
    """Split a program.

    Args:
      program, wanted, rest, by_data: the attributes of `SplitProgram`.
      unknown: the inputs that only the second part is given.
      early: whether only the last products on the way to the other results are left to the second
        part.

    Equations with effects belong to the first part, where it knows what they read. Of the other
    results it also computes those that need no product, if they are smaller than what would have to
    be kept for them.
    """
    outputs = program.outputs
    also = before_last_products(program, wanted) if early else set()
    light = light_results(program, wanted, rest, also=also, without=unknown)
    first = equations_for(program, [*wanted, *light], also=also, unknown=unknown)
    later = {v for i in rest if isinstance(v := outputs[i], Value)}
    second: Made = {}
    loops: dict[Equation, SplitLoop] = {}
    crossing: dict[Value, None] = {}
    for eq in reversed(program.equations):
        here = first.get(eq, ())
        read_here = [i for i, v in enumerate(eq.outputs) if v in later]
        crossing.update((eq.outputs[i], None) for i in read_here if i in here)
        left = tuple(i for i in read_here if i not in here)
        if eq.name == "scan" and here and not eq.has_effects:
            loops[eq] = SplitLoop.make(Scan(eq), here, left, by_data)
        if left or (eq.has_effects and eq not in first):
            made = left if eq in loops else made_for(eq, {eq.outputs[i] for i in left})
            second[eq] = made
            later.update(loops[eq].read_later if eq in loops else operands_of(eq, made))
    return SplitProgram(
        program=program,
        wanted=tuple(wanted),
        rest=tuple(rest),
        first=first,
        second=dict(reversed(second.items())),
        loops=loops,
        crossing=tuple(v for v in crossing if v not in program.inputs),
        by_data=by_data,
    )


def _read(
    env: Env, operands: Sequence[Operand], inputs: Sequence[Value], is_read: Sequence[bool]
) -> Env:
    """Return the arrays of the operands that a turn reads, each by its input of the body."""
    pairs = itertools.compress(zip(operands, inputs, strict=True), is_read)
    return {v: read(env, a) for a, v in pairs}
