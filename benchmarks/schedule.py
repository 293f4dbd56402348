"""Read a scheduled GPU program: which matmuls run while collectives and copies are in flight.

XLA:GPU prints each computation in the order of its schedule. A collective is in flight from its
start to its done; one without a start was scheduled with nothing to run beside it. So are copies
between the device and its host, whose memory has the number 5.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from zeroxla.program import hlo

NEXT_TURN, LOOP, OTHER = "next turn", "loop", "other"
# What a gathered wire passes through on its way to the matmul that reads it.
_PASSES_ON = {"all-gather", "all-gather-start", "all-gather-done", "bitcast", "concatenate"}
_PASSES_ON |= {"convert", "copy", "fusion", "get-tuple-element", "reshape", "slice", "transpose"}
_PASSES_ON |= {"tuple"}
_HOST = ":S(5)"
_COPIES = {"copy", "fusion", "dynamic-slice", "dynamic-update-slice"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One all-gather or all-to-all of a program.

    Attributes:
      direction: "forward" or "backward"; "" where it belongs to neither (persistent leaves).
      hop: the mesh axis, "node" or "device".
      serves: the layer whose matmul is the first to read what it brings, as the program names it
        (`h_3`, or `OTHER`); `NEXT_TURN` where the next turn of the loop around it is the first to,
        `LOOP` where the first turn of a loop after it is; None where nothing is found.
      in_loop: it is in the body of a loop.
      count: runs in a step.
      dtype: what it moves, as HLO names it: "u8" for wires.
      result_bytes: what one device holds of it when it is done.
      matmuls: how many matmuls are scheduled between its start and its done.
    """

    direction: str
    hop: str
    serves: str | None
    in_loop: bool
    count: int
    dtype: str
    result_bytes: int
    matmuls: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """One copy between a device and its host's memory.

    Attributes:
      to_host: whether it leads to the host.
      in_loop: it is in the body of a loop.
      num_bytes: the bytes that one device copies.
      matmuls: how many matmuls are scheduled between its start and its done.
    """

    to_host: bool
    in_loop: bool
    num_bytes: int
    matmuls: int


def host_copies(text: str) -> list[HostCopy]:
    """List the copies to and from host memory, in the order of the schedule.

    One without a start and a done runs beside nothing.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: the text is not scheduled.
    """
    _check_scheduled(text)
    module = hlo.parse(text)
    # The others are bodies of fusions and of reductions, which have no schedule.
    scheduled = {module.entry}
    for instructions in module.computations.values():
        for x in instructions.values():
            if x.opcode in ("while", "conditional", "call"):
                scheduled.update(x.called)
    names = [name for name in module.computations if name in scheduled]
    return [copy for name in names for copy in _host_copies_of(_Schedule(module, name))]


def _host_copies_of(schedule: _Schedule) -> Iterator[HostCopy]:
    order = list(schedule.instructions.values())
    for i, start in enumerate(order):
        if start.opcode in _COPIES:
            done, window = start, []
        elif start.opcode.endswith("-start") and _HOST in start.type_text:
            end = next(j for j, x in enumerate(order[i:], i) if schedule.is_done_of(x, start))
            done, window = order[end], order[i + 1 : end]
        else:
            continue
        operands = [schedule.instructions[name] for name in start.operands]
        to_host = _HOST in done.type_text
        others = [x for x in operands if (_HOST in x.type_text) != to_host]
        if not others:  # it stays where it is
            continue
        # Into a stack on the host goes the first operand that is not there, beside its place.
        copied = others[0] if to_host else done
        yield HostCopy(
            to_host=to_host,
            in_loop=schedule.name != schedule.module.entry,
            num_bytes=sum(shape.num_bytes for shape in copied.shapes),
            matmuls=sum(map(schedule.is_matmul, window)),
        )


def gathers(text: str) -> list[Transfer]:
    """List the all-gathers of a compiled GPU program, in the order of its schedule.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: the text is not scheduled.
    """
    return _transfers(text, "all-gather")


def exchanges(text: str) -> list[Transfer]:
    """List the all-to-alls of a compiled GPU program, as `gathers` does."""
    return _transfers(text, "all-to-all")


def _check_scheduled(text: str) -> None:
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "the program is not scheduled, so the order of its instructions means nothing; pass "
            f"compiled.as_text(). It starts with {text[:80]!r}"
        )


def _transfers(text: str, kind: str) -> list[Transfer]:
    _check_scheduled(text)
    module = hlo.parse(text)
    found = {c.name: c for c in hlo.collectives(module) if c.kind == kind}
    return [
        transfer
        for name in module.computations
        for transfer in _transfers_of(_Schedule(module, name), found)
    ]


def _transfers_of(schedule: _Schedule, found: dict[str, hlo.Collective]) -> Iterator[Transfer]:
    order = list(schedule.instructions.values())
    for i, start in enumerate(order):
        collective = found.get(start.name)
        if collective is None:
            continue
        window: list[hlo.Instruction] = []
        if collective.asynchronous:
            ends = (j for j, x in enumerate(order[i:], i) if schedule.is_done_of(x, start))
            window = order[i + 1 : next(ends)]
        direction = re.search(r"\b(forward|backward)/", collective.op_name)
        first, second = collective.groups[0][:2]
        yield Transfer(
            direction=direction.group(1) if direction else "",
            hop="device" if second == first + 1 else "node",
            serves=schedule.first_reader(start.name),
            in_loop=schedule.name != schedule.module.entry,
            count=collective.count,
            dtype=collective.results[0].dtype,
            result_bytes=sum(shape.num_bytes for shape in collective.results),
            matmuls=sum(schedule.is_matmul(x) for x in window),
        )


class _Schedule:
    """One computation in the order of its schedule."""

    def __init__(self, module: hlo.Module, name: str) -> None:
        self.module, self.name = module, name
        self.instructions = module.computations[name]
        self.users: dict[str, list[hlo.Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                self.users.setdefault(operand, []).append(instruction)
        self._has_matmul = functools.cache(
            lambda name: any(map(self.is_matmul, module.computations.get(name, {}).values()))
        )

    def is_matmul(self, instruction: hlo.Instruction) -> bool:
        """Whether it is a matmul, or a fusion or loop with one in it."""
        if instruction.opcode == "custom-call":
            return "__cublas" in instruction.rest
        return instruction.opcode == "dot" or any(map(self._has_matmul, instruction.called))

    def is_done_of(self, instruction: hlo.Instruction, start: hlo.Instruction) -> bool:
        return instruction.opcode.endswith("-done") and instruction.operands[0] == start.name

    def first_reader(self, name: str) -> str | None:
        """Follow a value to whatever computes with it; return the first in the schedule."""
        found: dict[str, str] = {}  # by instruction
        seen, stack = {name}, [name]
        while stack:
            for user in self.users.get(stack.pop(), ()):
                if user.name in seen:
                    continue
                seen.add(user.name)
                if user.opcode == "while":
                    found[user.name] = LOOP
                elif self.is_matmul(user):
                    layer = re.search(r"\bh_\d+\b", user.op_name)
                    found[user.name] = layer.group() if layer else OTHER
                elif user.is_root:
                    found[user.name] = NEXT_TURN
                elif user.opcode in _PASSES_ON:
                    stack.append(user.name)
        return next((found[name] for name in self.instructions if name in found), None)
