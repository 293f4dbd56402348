"""Finds how often a `while` loop runs: XLA notes it, or it follows from the loop's counter."""

from __future__ import annotations

import re

from zeroxla.program.hlo.text import Instruction, Module

_KNOWN_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')


def trip_count(loop: Instruction, scope: dict[str, Instruction], module: Module) -> int | None:
    """Return the number of trips of a `while` loop; None if it depends on data.

    XLA notes the number in `backend_config` when it has optimized a program. In a lowered program
    it follows from the counter, if the start, the step and the limit are constants.

    Args:
      loop: the `while` instruction.
      scope: the computation that it is in.
      module: the program.
    """
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known.group(1))
    condition = module.computations[loop.attribute("condition") or ""]
    body = module.computations[loop.attribute("body") or ""]
    compare = _root(condition)
    direction = compare.attribute("direction")
    if compare.opcode != "compare" or direction not in ("LT", "LE", "GT", "GE"):
        return None
    counter, limit = (condition[name] for name in compare.operands)
    index = _carry_index(counter)
    stop = _integer(limit)
    if index is None or stop is None:
        return None
    start = _integer(_tuple_item(scope[loop.operands[0]], index, scope))
    step = _step(_tuple_item(_root(body), index, body), index, body)
    if start is None or step is None:
        return None
    if direction in ("GT", "GE"):
        start, stop, step = -start, -stop, -step
    distance = stop - start + (1 if direction in ("LE", "GE") else 0)
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _root(computation: dict[str, Instruction]) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


def _integer(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    literal = instruction.rest.split(")")[0]
    return int(literal) if re.fullmatch(r"-?\d+", literal) else None


def _carry_index(instruction: Instruction) -> int | None:
    if instruction.opcode != "get-tuple-element":
        return None
    index = instruction.attribute("index")
    return None if index is None else int(index)


def _tuple_item(made: Instruction, index: int, scope: dict[str, Instruction]) -> Instruction | None:
    if made.opcode != "tuple":
        return None
    item = scope[made.operands[index]]
    return scope[item.operands[0]] if item.opcode == "copy" else item


def _step(update: Instruction | None, index: int, body: dict[str, Instruction]) -> int | None:
    """Return c if the body's new counter is counter + c; None for any other update."""
    if update is None or update.opcode != "add":
        return None
    first, second = (body[name] for name in update.operands)
    if _carry_index(first) == index:
        return _integer(second)
    return _integer(first) if _carry_index(second) == index else None
