"""Splits HLO text into computations and instructions, whose parts are read on demand."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One array of a program, as one device has it.

    Attributes:
      dtype: HLO's name of the dtype: "f32", "bf16", "s8", ...
      dims: its sizes.
      element_bits: bits that an element takes in memory.
    """

    dtype: str
    dims: tuple[int, ...]
    element_bits: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_elements * self.element_bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: the name of its result.
      opcode: the operation, such as "all-gather".
      type_text: the type of the result.
      rest: the text after the opcode's "(": operands and attributes.
      is_root: whether its result is the computation's.
    """

    name: str
    opcode: str
    type_text: str
    rest: str
    is_root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result. A tuple is flattened in order, without its tokens."""
        return tuple(_shapes(self.type_text))

    @functools.cached_property
    def _operand_text_end(self) -> int:
        depth = 1
        for match in re.finditer(r"[()]", self.rest):
            depth += 1 if match.group() == "(" else -1
            if depth == 0:
                return match.start()
        raise ValueError(f"HLO instruction {self.name!r} has no closing parenthesis: {self.rest}")

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands. A constant or a parameter gives its literal text instead."""
        text = re.sub(r"/\*.*?\*/", "", self.rest[: self._operand_text_end])
        if "%" in text:
            return tuple(re.findall(r"%([\w.\-]+)", text))
        return tuple(name.strip() for name in text.split(",") if name.strip())

    @property
    def attributes(self) -> str:
        """Everything after the operands: dims, groups, metadata, backend_config."""
        return self.rest[self._operand_text_end + 1 :]

    @property
    def op_name(self) -> str:
        """The path of `jax.named_scope`s and transforms that JAX recorded; "" if there is none."""
        match = _OP_NAME.search(self.rest)
        return match.group(1) if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction runs, in the order of its attributes."""
        names = _CALLED.findall(self.rest)
        for group in _CALLED_LIST.findall(self.rest):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return tuple(names)

    def attribute(self, key: str) -> str | None:
        """Return the name after `key=`, or None."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return match.group(1) if match else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A program.

    Attributes:
      entry: the name of the computation that it starts with.
      num_partitions: the number of devices that it is partitioned over; None if the text has none.
      computations: the instructions of each computation, by name.
    """

    entry: str
    num_partitions: int | None
    computations: dict[str, dict[str, Instruction]]


def parse(text: str) -> Module:
    """Split HLO text into computations and instructions.

    Args:
      text: one HLO module, in the long form (compiled) or the short form (lowered).

    Returns:
      The module. Instructions keep their own text and are read further on demand.

    Raises:
      ValueError: the text has no ENTRY computation (StableHLO, a jaxpr, or a fragment).

    Cost: about 1 s per 200 000 lines.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry = None
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is not None:
            if match := _INSTRUCTION.match(line):
                root, name, type_text, opcode, rest = match.groups()
                current[name] = Instruction(name, opcode, type_text, rest, root is not None)
        elif match := _COMPUTATION.match(line):
            current = computations[match.group(2)] = {}
            if match.group(1):
                entry = match.group(2)
    if entry is None:
        raise ValueError(
            "no ENTRY computation found, so this is not HLO text; pass compiled.as_text() or "
            f'lowered.as_text(dialect="hlo", debug_info=True). It starts with {text[:80]!r}'
        )
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text, re.MULTILINE)
    return Module(
        entry=entry,
        num_partitions=int(partitions.group(1)) if partitions else None,
        computations=computations,
    )


def _shapes(type_text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(type_text):
        width = re.match(r"[a-z]+(\d+)", dtype)
        if width is None and dtype != "pred":
            continue  # token[], opaque[]
        # Types below a byte are packed only where the layout says so, E(4); else each takes a byte.
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed.group(1)) if packed else max(8, int(width.group(1)) if width else 8)
        sizes = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        yield Shape(dtype=dtype, dims=sizes, element_bits=bits)
