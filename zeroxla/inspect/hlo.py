"""Read the collectives out of HLO text, with how often a step runs each of them.

HLO text is what `compiled.as_text()` and `lowered.as_text(dialect="hlo", debug_info=True)` give. It
is read as text because that is the only public form of a compiled program that names every
collective, its wire dtype and its device groups, on every backend. The grammar followed here is
that of XLA's own hlo_parser, as printed by JAX 0.10.2 to 0.12 for CPUs and GPUs.

A program is a list of computations; a computation is a list of instructions. A collective inside
a loop runs once per trip, so the walk from the entry multiplies the trip counts of all loops
around it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Other instructions that communicate. zeroxla emits none; to skip one silently would be to lie.
_UNREAD_KINDS = ("ragged-all-to-all", "collective-broadcast", "send")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_KNOWN_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"\{(?P<lists>(?:\{[\d,]*\},?)*)\}"
    r"|\[(?P<tile>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<permute>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))? "
    r"\{(?P<axes>[^}]*)\})"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One array of a program: HLO dtype ("f32", "bf16", "s8", ...), dims, bytes per device."""

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
    """One line of a computation in parts; `rest` is the text after the opcode's "("."""

    name: str
    opcode: str
    type_text: str
    rest: str
    is_root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, a tuple flattened in order; tokens are left out."""
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
        """Names of the operands (for a constant or a parameter: its literal text)."""
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
        """Path of `jax.named_scope` names and transforms that JAX recorded; "" if there is none."""
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
    """A program: its computations by name, each a dict from instruction name to instruction."""

    entry: str
    num_partitions: int | None
    computations: dict[str, dict[str, Instruction]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective instruction as reached along one chain of callers.

    Attributes:
      kind: one of `KINDS`; an asynchronous start/done pair is one collective.
      name: the instruction's name in the text.
      op_name: `jax.named_scope` path, those of the callers included.
      operands, results: what one device passes in and gets out; a combined collective has several.
      groups: device groups as positions in the mesh's flat device order; () = one of all devices.
      pairs: (source, target) positions of a collective-permute, else ().
      count: runs per step, all enclosing trip counts multiplied.
      conditional: sits in a branch, so `count` is an upper bound.
      asynchronous: the compiler split it into a start and a done.
    """

    kind: str
    name: str
    op_name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    count: int
    conditional: bool
    asynchronous: bool


def parse(text: str) -> Module:
    """Split HLO text into computations and instructions.

    Args:
      text: one HLO module, long form (compiled) or short form (lowered).

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


def collectives(module: Module, *, while_trips: int | None = None) -> tuple[Collective, ...]:
    """List every collective that one run of the program may execute.

    Args:
      module: from `parse`.
      while_trips: trips to assume for a loop whose trip count the program does not fix.

    Returns:
      Collectives in program order, one entry for each place of a call chain; conditionals give
      those of every branch, marked.

    Raises:
      ValueError: a loop that holds collectives has no fixed trip count and `while_trips` is None.
      NotImplementedError: a collective whose bytes this reader does not know.
    """

    @functools.cache
    def communicates(computation: str) -> bool:
        return any(
            _kind(instruction) is not None or any(map(communicates, instruction.called))
            for instruction in module.computations.get(computation, {}).values()
        )

    def visit(computation: str, path: str, count: int, conditional: bool) -> Iterator[Collective]:
        if not communicates(computation):
            return
        scope = module.computations[computation]
        for instruction in scope.values():
            # The start carries the shapes; a done or update may name the same computation again.
            if instruction.opcode.endswith(("-done", "-update")):
                continue
            if kind := _kind(instruction):
                yield _collective(kind, instruction, scope, path, count, conditional)
            elif any(map(communicates, instruction.called)):
                inner_path = _join(path, instruction.op_name)
                if instruction.opcode == "while":
                    trips = _trip_count(instruction, scope, module)
                    if trips is None:
                        trips = while_trips
                    if trips is None:
                        raise ValueError(
                            f"the loop {instruction.name!r} (op_name {instruction.op_name!r}) "
                            "holds collectives but its trip count depends on data; pass "
                            "while_trips=N to count it as N trips"
                        )
                    body, condition = (instruction.attribute(k) for k in ("body", "condition"))
                    yield from visit(body or "", inner_path, count * trips, conditional)
                    yield from visit(condition or "", inner_path, count * (trips + 1), conditional)
                else:
                    inner = conditional or instruction.opcode == "conditional"
                    for name in instruction.called:
                        yield from visit(name, inner_path, count, inner)

    return tuple(visit(module.entry, "", 1, False))


def _kind(instruction: Instruction) -> str | None:
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
    conditional: bool,
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
        pairs=tuple((a, b) for a, b in _lists(pairs.group(1))) if pairs else (),
        count=count,
        conditional=conditional,
        asynchronous=asynchronous,
    )


def _join(path: str, op_name: str) -> str:
    # Compiled programs hold absolute paths; in lowered ones a callee's is relative to its call.
    if not path or (op_name and op_name.split("/")[0] == path.split("/")[0]):
        return op_name
    return f"{path}/{op_name}" if op_name else path


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


def _lists(text: str) -> Iterator[tuple[int, ...]]:
    for group in re.findall(r"\{([\d,]*)\}", text):
        yield _ints(group)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Expand a `replica_groups=` attribute into lists of device positions.

    Args:
      attributes: text that may hold it, in any of the forms that XLA prints: lists
        `{{0,1},{2,3}}`, a tiled iota `[4,2]<=[2,4]T(1,0)`, or axes of a mesh
        `mesh['a'=2,'b'=4] {'b'}`, the last with `device_ids=(...)` for a permuted mesh and
        sub-axes `'b':(1)2` (size 2 after a major part of size 1).

    Returns:
      The groups, in order; () when there is no such attribute or it is `{}` (all devices).

    Example:
      >>> replica_groups("replica_groups=[4,2]<=[2,4]T(1,0)")
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    match = _GROUPS.search(attributes)
    if match is None:
        if "replica_groups=" in attributes:
            raise ValueError(f"replica_groups in a form this reader does not know: {attributes}")
        return ()
    if match["tile"]:
        dims, reshape = _ints(match["tile"]), _ints(match["reshape"])
        ids = _iota(reshape, _ints(match["permute"] or "")).reshape(dims)
    elif match["mesh"]:
        ids = _mesh_groups(match["mesh"], match["ids"], match["axes"])
    else:
        return tuple(_lists(match["lists"]))
    return tuple(tuple(int(i) for i in group) for group in ids)


def _iota(reshape: tuple[int, ...], permute: tuple[int, ...]) -> np.ndarray:
    array = np.arange(math.prod(reshape)).reshape(reshape)
    return array.transpose(permute or range(len(reshape)))


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Return [groups, members]: the axes (or sub-axes) in `axes` vary fastest, in their order."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    parts = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in _GROUP_AXIS.findall(axes)
    ]
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids):
        ids = _iota(_ints(iota[1]), _ints(iota[2] or ""))
    else:
        ids = np.array(_ints(device_ids))
    # Cut every mesh axis at the borders of its sub-axes, so that each part is a dim of its own.
    dims, position = [], {}
    for name, size in sizes.items():
        cuts = {1, size}
        for part, pre, length in parts:
            if part == name:
                cuts |= {pre, pre * length}
        borders = sorted(cuts)
        for low, high in itertools.pairwise(borders):
            position[name, low] = len(dims)
            dims.append(high // low)
        if size == 1:
            position[name, 1] = len(dims)
            dims.append(1)
    grouped = [position[name, pre] for name, pre, _ in parts]
    others = [dim for dim in range(len(dims)) if dim not in grouped]
    members = math.prod(dims[dim] for dim in grouped)
    return ids.reshape(dims).transpose(others + grouped).reshape(-1, members)


def _trip_count(loop: Instruction, scope: dict[str, Instruction], module: Module) -> int | None:
    """Return the trips of a while loop, or None if they depend on data.

    XLA notes the count in backend_config once it has optimized a program. In a lowered program it
    follows from the counter: a constant start, a constant step, a comparison with a constant.
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
    """Return c where the body's new counter is counter + c."""
    if update is None or update.opcode != "add":
        return None
    first, second = (body[name] for name in update.operands)
    if _carry_index(first) == index:
        return _integer(second)
    return _integer(first) if _carry_index(second) == index else None
