"""The layers of a line: where a model that was not written as a list of layers may be cut.

A block of a loop is a layer. In the rest of the line a layer begins where leaves of another module
are read for the first time: of the places between the readers of two modules, at the one that the
fewest bytes cross.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.line import BlockLoop, LossLine
from zeroxla.program.paths import Path
from zeroxla.program.stacked_scan import Stacked
from zeroxla.program.trace import Operand, Value

BLOCK = "block"
"""The kind of a block of a loop."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _FirstUse:
    """A stretch of a line in which leaves of one module are used for the first time.

    Attributes:
      start, end: the first place, and the one after the last.
      module: the path of the leaves' module.
      block: the number of the block; None outside of a loop.
      parameters: the number of the parameters that no place before has used.
    """

    start: int
    end: int
    module: Path
    block: int | None
    parameters: int


def layers_of(line: LossLine, paths: Sequence[Path]) -> tuple[list[int], list[LayerCost]]:
    """Return the places at which the layers of a line begin, and the layers.

    Args:
      line: the line.
      paths: the paths of the model's leaves. Leaves of one module have one parent.
    """
    uses = list(_joined(_first_uses(line, paths)))
    starts = [0]
    for before, after in itertools.pairwise(uses):
        places = range(before.end, after.start + 1)
        starts.append(min(reversed(places), key=line.bytes_across.__getitem__))
    across = [line.bytes_across[start] for start in (*starts[1:], line.length)]
    costs = [
        LayerCost(
            name=_name(use), kind=_kind(use), parameters=use.parameters, bytes_after=bytes_after
        )
        for use, bytes_after in zip(uses, across, strict=True)
    ]
    return starts, costs


def _joined(uses: Iterable[_FirstUse]) -> Iterator[_FirstUse]:
    """Join the uses of one module that follow each other."""
    found: _FirstUse | None = None
    for use in uses:
        if found is None:
            found = use
        elif use.block is None and found.block is None and use.module == found.module:
            total = found.parameters + use.parameters
            found = dataclasses.replace(found, end=use.end, parameters=total)
        else:
            yield found
            found = use
    if found is not None:
        yield found


def _first_uses(line: LossLine, paths: Sequence[Path]) -> Iterator[_FirstUse]:
    """Yield the places of a line at which leaves are used for the first time, and every block."""
    numbers = {leaf: i for i, leaf in enumerate(line.leaves)}
    roots = _leaves_behind(line)
    seen: set[Value] = set()

    def new(operands: Iterable[Operand]) -> list[Value]:
        found = dict.fromkeys(v for a in operands for v in roots.get(a, ()) if v not in seen)
        seen.update(found)
        return list(found)

    for part, start in zip(line.parts, line.starts):
        if not isinstance(part, BlockLoop):
            if leaves := new(part.values):
                size = sum(leaf.aval.size for leaf in leaves)
                module = _parent([paths[numbers[leaf]] for leaf in leaves[:1]])
                yield _FirstUse(
                    start=start, end=start + 1, module=module, block=None, parameters=size
                )
            continue
        inputs = part.scan.equation.inputs
        others = new(a for i, a in enumerate(inputs) if i not in part.stacked)
        extra = sum(leaf.aval.size for leaf in others)
        fresh = {i for i, x in part.stacked.items() if not seen.issuperset(_sources(x))}
        seen.update(v for x in part.stacked.values() for v in _sources(x))
        for turn in range(part.scan.length):
            block = part.block(turn)
            mine = {i: _of_block(x, block, part.scan.length) for i, x in part.stacked.items()}
            named = [paths[numbers[leaf]] for leaf, _ in mine.values() if leaf in numbers]
            sizes = (size for i, (leaf, size) in mine.items() if i in fresh and leaf in numbers)
            yield _FirstUse(
                start=start + turn,
                end=start + turn + 1,
                module=_parent(named),
                block=block,
                parameters=sum(sizes) + (0 if turn else extra),
            )


def _sources(stacked: Stacked | tuple[Value, ...]) -> tuple[Value, ...]:
    return (stacked.leaf,) if isinstance(stacked, Stacked) else stacked


def _of_block(
    stacked: Stacked | tuple[Value, ...], block: int, num_blocks: int
) -> tuple[Value, int]:
    """Return the leaf that a block reads, and the number of its elements that it reads."""
    if isinstance(stacked, Stacked):
        return stacked.leaf, stacked.leaf.aval.size // num_blocks
    return stacked[block], stacked[block].aval.size


def _leaves_behind(line: LossLine) -> dict[Operand, tuple[Value, ...]]:
    """Return the leaves that each value without a place follows from."""
    found: dict[Operand, tuple[Value, ...]] = {leaf: (leaf,) for leaf in line.leaves}
    for eq in dict.fromkeys(line.makers.values()):
        leaves = tuple(dict.fromkeys(v for a in eq.values for v in found.get(a, ())))
        if leaves:
            found.update((v, leaves) for v in eq.outputs)
    return found


def _parent(paths: Sequence[Path]) -> Path:
    """Return the path that leaves share, without the name of a single leaf."""
    shared = []
    for names in zip(*(path[:-1] for path in paths)):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared) if shared or len(paths) != 1 else paths[0]


def _name(use: _FirstUse) -> str:
    module = "/".join(use.module)
    if use.block is None:
        return module
    is_one_of_many = not re.search(r"\d", use.module[-1]) if use.module else True
    return f"{module or BLOCK} {use.block}" if is_one_of_many else module


def _kind(use: _FirstUse) -> str:
    return BLOCK if use.block is not None else re.sub(r"[_\d]+$", "", use.module[-1])
