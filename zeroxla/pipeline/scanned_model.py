"""A model that scans over stacked blocks, cut into stages from its trace, without a layer list.

The loss is traced to a program, and its largest loop over stacked leaves is the row of blocks. The
equations before the loop are the first layer, those after it the last one. Arrays that follow from
the batch and the key alone (masks, rotary tables, keys of dropout) are computed again in every
stage that reads them. Values that depend on leaves and on the batch are activations: they travel
from stage to stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend import Adapted
from zeroxla.pipeline.find_blocks import Blocks, find_blocks
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.stage import Stage
from zeroxla.pipeline.stage_moves import LeafPiece
from zeroxla.program.stacked_scan import loop_body
from zeroxla.program.trace import Value, closure, read, run


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScannedModel:
    """A model that scans over stacked blocks.

    Attributes:
      adapted: the whole model as pure functions.
    """

    adapted: Adapted

    def cut(
        self,
        divide: Callable[[Sequence[LayerCost]], Partition],
        tree: Any,
        batch: Any,
        key: jax.Array,
        *,
        train: bool,
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages; see `LayerList.cut`."""
        blocks = find_blocks(self.adapted, tree, batch, key, train=train)
        partition = divide(layer_costs(blocks))
        return stages_of(blocks, partition.boundaries), partition


def layer_costs(blocks: Blocks) -> list[LayerCost]:
    """Return the cost of each layer: before the blocks, each block, after the blocks."""
    of_blocks = {s.leaf for s in blocks.stacked.values()}
    size = sum(leaf.aval.size for leaf in of_blocks)
    first = blocks.leaves_of(blocks.loop.carry) - of_blocks
    last = blocks.leaves_of(blocks.read_after) - of_blocks
    tied = first & last

    def count(leaves: set[Value]) -> int:
        return sum(leaf.aval.size for leaf in leaves)

    each = size // blocks.num_blocks
    return [
        LayerCost(name="before the blocks", kind="first", parameters=count(first)),
        *(
            LayerCost(name=f"block {i}", kind="block", parameters=each)
            for i in range(blocks.num_blocks)
        ),
        LayerCost(name="after the blocks", kind="last", parameters=count(last - tied)),
    ]


def stages_of(blocks: Blocks, boundaries: Sequence[int]) -> list[Stage]:
    """Cut a model into stages at boundaries of the layers that `layer_costs` lists.

    Raises:
      ValueError: the first or the last stage would have no layer.
    """
    last = len(boundaries) - 2
    for stage in (0, last):
        if boundaries[stage] == boundaries[stage + 1]:
            raise ValueError(
                f"the boundaries {list(boundaries)} leave stage {stage} without a layer; of a "
                "model with scanned blocks the first stage has what comes before them, the last "
                "one what follows them"
            )
    stages = []
    for i, (start, end) in enumerate(itertools.pairwise(boundaries)):
        first, stop = max(start - 1, 0), min(end - 1, blocks.num_blocks)
        stages.append(_stage(blocks, first, max(first, stop), is_first=i == 0, is_last=i == last))
    return stages


def _stage(blocks: Blocks, first: int, end: int, *, is_first: bool, is_last: bool) -> Stage:
    """Make the stage that runs the blocks from `first` to `end`."""
    wanted: list[Value] = []
    if is_first:
        wanted += [*(a for a in blocks.loop.carry if isinstance(a, Value)), *blocks.passed_on]
    if end > first:
        wanted += blocks.other_operands
    if is_last:
        wanted += blocks.read_after
    given = set() if is_first else set(blocks.passed_on)
    needed, roots = closure(
        [v for v in wanted if v not in given],
        {v: eq for v, eq in blocks.producers.items() if v not in given},
    )
    of_blocks = {s.leaf: s.layer_dim for s in blocks.stacked.values()} if end > first else {}
    used = [
        leaf for leaf in blocks.leaves if leaf in of_blocks or (leaf in roots and leaf not in given)
    ]
    numbers = {leaf: i for i, leaf in enumerate(blocks.leaves)}
    pieces = tuple(
        LeafPiece(leaf=numbers[leaf], dim=of_blocks[leaf], layers=(first, end))
        if leaf in of_blocks
        else LeafPiece(leaf=numbers[leaf])
        for leaf in used
    )
    num_leaves = len(blocks.leaves)

    def compute(leaves: Sequence[jax.Array], x: Any, batch: Any, key: jax.Array) -> Any:
        env: dict[Value, Any] = dict(zip(used, leaves, strict=True))
        env.update(zip(blocks.program.inputs[num_leaves:], jax.tree.leaves((batch, key))))
        if is_first:
            run(needed, env)
            carry = [read(env, a) for a in blocks.loop.carry]
        else:
            num_carry = blocks.loop.num_carry
            carry = list(x[:num_carry])
            env.update(zip(blocks.passed_on, x[num_carry:], strict=True))
            run(needed, env)
        if end > first:
            carry = _loop(blocks, env, carry, first, end)
        if not is_last:
            return (*carry, *(env[v] for v in blocks.passed_on))
        env.update(zip(blocks.loop.equation.outputs, carry))
        run(blocks.after, env)
        outputs = [jnp.asarray(read(env, a)) for a in blocks.program.outputs]
        loss, metrics, _ = blocks.result.unflatten(outputs)
        return loss, metrics

    return Stage(pieces=pieces, run=compute, is_first=is_first, is_last=is_last)


def _loop(
    blocks: Blocks, env: Mapping[Value, Any], carry: list[Any], first: int, end: int
) -> list[Any]:
    """Run the blocks from `first` to `end`.

    Args:
      blocks: the model.
      env: the arrays of values. The stacked leaves among them hold the layers of these blocks only.
      carry: the carry of the block before.
    """
    loop = blocks.loop
    body, _ = loop_body(loop, blocks.stacked)
    consts = [read(env, a) for a in loop.consts]
    xs = []
    for i, operand in enumerate(loop.xs, loop.first_x):
        if i in blocks.stacked:
            chain = blocks.stacked[i]
            xs.append(jnp.moveaxis(env[chain.leaf], chain.layer_dim, 0))
        else:
            xs.append(lax.slice_in_dim(read(env, operand), first, end))

    def turn(carry: list[Any], x: list[Any]) -> tuple[list[Any], None]:
        return body(*consts, *carry, *x)[: loop.num_carry], None

    return lax.scan(turn, carry, xs, length=end - first)[0]
