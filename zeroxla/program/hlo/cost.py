"""What one instruction of a compiled program costs a device: FLOPs, and bytes of its memory."""

from __future__ import annotations

import dataclasses

from zeroxla.program.hlo.flops import product_flops
from zeroxla.program.hlo.text import Instruction, Module
from zeroxla.program.primitives import ARRANGEMENTS, SLICES

_FREE = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "copy-done",
        "domain",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
"""Instructions that move no bytes: they name what is there."""
# HLO has hyphens in the names.
_SLICES = frozenset(name.replace("_", "-") for name in SLICES)
_SAME_PLACE = ARRANGEMENTS | {"bitcast", "convert"}


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionCost:
    """What one run of an instruction does.

    Attributes:
      flops: FLOPs of products, a multiplication and an addition each.
      dtype: HLO's dtype of the first operand of the largest product; "f32" if there is none.
      num_bytes: bytes of memory that it reads and writes.
    """

    flops: float
    dtype: str
    num_bytes: float


def cost_of(
    instruction: Instruction, scope: dict[str, Instruction], module: Module
) -> InstructionCost:
    """Return the cost of an instruction that is no loop, branch or collective.

    Of an operand that is only sliced, the slices count, and of a result that is written in place,
    what is written.

    Args:
      instruction: the instruction.
      scope: the instructions of its computation, by name.
      module: the program.
    """
    if instruction.opcode in _FREE:
        return InstructionCost(0.0, "f32", 0.0)
    products = list(_products(instruction, scope, module))
    flops = sum(found for found, _ in products)
    dtype = max(products, default=(0.0, "f32"))[1]
    return InstructionCost(flops, dtype, _bytes(instruction, scope, module))


def _products(instruction: Instruction, scope: dict[str, Instruction], module: Module):
    """Yield (FLOPs, dtype) of the products of an instruction, those inside it included."""
    flops = product_flops(instruction, scope)
    if flops:
        yield flops, scope[instruction.operands[0]].shapes[0].dtype
    for name in instruction.called:
        inner = module.computations.get(name, {})
        for other in inner.values():
            yield from _products(other, inner, module)


def _bytes(instruction: Instruction, scope: dict[str, Instruction], module: Module) -> float:
    body = None
    if instruction.opcode in ("fusion", "fusion-start"):
        body = module.computations.get(next(iter(instruction.called), ""))
    operands = [scope[name] for name in instruction.operands if name in scope]
    if body is None:
        if instruction.opcode in _SLICES:
            return 2.0 * _size(instruction)
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * _size(operands[1])
        # The workspace of a library's product is no result.
        most = 1 if instruction.opcode == "custom-call" else None
        written = instruction.shapes[:most]
        return float(sum(x.num_bytes for x in written) + sum(map(_size, operands)))
    parameters = [x for x in body.values() if x.opcode == "parameter"]
    parameters.sort(key=lambda x: int(x.operands[0]))
    updated = _updated(body)
    read = sum(_read_of(x, body) for x in parameters if x.name not in updated)
    (root,) = [x for x in body.values() if x.is_root]
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return float(read + sum(_written_by(x, body) for x in parts))


def _read_of(parameter: Instruction, body: dict[str, Instruction]) -> float:
    found = 0.0
    seen = [parameter.name]
    for name in seen:
        for user in (x for x in body.values() if name in x.operands):
            if user.opcode == "bitcast":
                seen.append(user.name)
            elif user.opcode in _SLICES and user.operands[0] == name:
                found += _size(user)
            else:
                return float(_size(parameter))
    return min(found, float(_size(parameter)))


def _updated(body: dict[str, Instruction]) -> set[str]:
    """Return the names of parameters that are only updated in place."""
    found = set()
    for x in body.values():
        if x.opcode == "dynamic-update-slice":
            into = _behind(body[x.operands[0]], body)
            users = [y for y in body.values() if into.name in y.operands]
            if into.opcode == "parameter" and len(users) == 1:
                found.add(into.name)
    return found


def _written_by(result: Instruction, body: dict[str, Instruction]) -> float:
    made = _behind(result, body)
    if made.opcode == "dynamic-update-slice":
        return float(_size(body[made.operands[1]]))
    return float(_size(result))


def _behind(instruction: Instruction, body: dict[str, Instruction]) -> Instruction:
    """Return what an instruction is only another form of."""
    while instruction.opcode in _SAME_PLACE and instruction.operands[0] in body:
        instruction = body[instruction.operands[0]]
    return instruction


def _size(instruction: Instruction) -> int:
    return sum(shape.num_bytes for shape in instruction.shapes)
