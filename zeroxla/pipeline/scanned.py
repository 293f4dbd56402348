"""A model that scans over stacked blocks, cut into stages from its trace: no layer list is needed.

The loss is a program; its largest loop over stacked leaves is the row of blocks. What comes before
the loop is the first layer, what follows it the last one. Arrays that follow from the batch and
the key alone (masks, rotary tables, keys of dropout) are computed again where they are read; what
depends on leaves and the batch is an activation and travels from stage to stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla import compat
from zeroxla.adapters import Adapted
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.moves import Piece
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.stage import Stage
from zeroxla.stacked import Stacked, find_stacked, loop_body
from zeroxla.trace import Atom, Equation, Program, Value, closure, read, run, trace


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
        """Cut it into stages; as `LayerList.cut`."""
        blocks = take_apart(self.adapted, tree, batch, key, train=train)
        partition = divide(layer_costs(blocks))
        return stages_of(blocks, partition.boundaries), partition


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """A loss, taken apart at its loop over blocks.

    Attributes:
      program: the loss.
      result: tree structure of (loss, metrics, model_state).
      leaves: the values of the model's leaves.
      loop: the scan.
      stacked: which of its `xs` are leaves.
      known: the equation that makes each value before the loop, or beside it.
      travels: the activations made before the loop that are read after it, or in it besides the
        carry.
    """

    program: Program
    result: Any
    leaves: tuple[Value, ...]
    loop: Equation
    stacked: Mapping[int, Stacked]
    known: Mapping[Value, Equation]
    travels: tuple[Value, ...]

    @property
    def num_blocks(self) -> int:
        return self.loop.params["length"]

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of constants and carries of the loop."""
        return compat.scan_counts(self.loop.params)


def take_apart(adapted: Adapted, tree: Any, batch: Any, key: jax.Array, *, train: bool) -> Blocks:
    """Find the blocks of a model.

    Args:
      adapted: the model.
      tree: shapes of its leaves.
      batch, key: of a micro-batch.
      train: whether it is trained.

    Raises:
      ValueError: it has no loop over stacked leaves, or one that cannot be cut.
    """
    shapes, structure = jax.tree.flatten(tree)

    def loss(leaves: list[jax.Array], batch: Any, key: jax.Array) -> Any:
        return adapted.loss(structure.unflatten(leaves), {}, batch, key, train=train)

    program, result = trace(loss, shapes, batch, key)
    leaves = program.inputs[: len(shapes)]
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    candidates = []
    for eq in program.equations:
        if eq.name == "scan":
            stacked = _stacked(eq, producers, leaves)
            size = sum(s.leaf.aval.size for s in stacked.values())
            candidates.append((size, eq, stacked))
    size, loop, stacked = max(candidates, key=lambda c: c[0], default=(0, None, {}))
    if loop is None or not size:
        raise ValueError(
            "the model has no loop over stacked blocks to cut; build it with scanned blocks "
            "(scan=True), or give its layers as zeroxla.Pipeline([...], loss)"
        )
    _check_loop(loop, program)
    after = _dependents(program.equations, loop.outputs)
    known = {v: eq for v, eq in producers.items() if eq not in after and eq is not loop}
    read_later = [v for eq in after for v in eq.values]
    read_later += [a for a in program.outputs if isinstance(a, Value)]
    num_consts, num_carry = compat.scan_counts(loop.params)
    beside = [
        a
        for i, a in enumerate(loop.inputs)
        if isinstance(a, Value) and i not in range(num_consts, num_consts + num_carry)
    ]
    activations = _activations(program, leaves)
    travels = dict.fromkeys(v for v in (*beside, *read_later) if v in activations and v in known)
    return Blocks(
        program=program,
        result=result,
        leaves=leaves,
        loop=loop,
        stacked=stacked,
        known=known,
        travels=tuple(travels),
    )


def layer_costs(blocks: Blocks) -> list[LayerCost]:
    """Return the layers: what is before the blocks, each block, what is after them."""
    of_blocks = {s.leaf for s in blocks.stacked.values()}
    size = sum(leaf.aval.size for leaf in of_blocks)
    first = _roots(blocks, _carried(blocks)) - of_blocks
    last = _roots(blocks, _read_last(blocks)) - of_blocks
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
    """Cut a model at boundaries of the layers that `layer_costs` lists."""
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
    wanted: list[Value] = []
    if is_first:
        wanted += [*_carried(blocks), *blocks.travels]
    if end > first:
        wanted += _beside(blocks)
    if is_last:
        wanted += _read_last(blocks)
    given = set() if is_first else set(blocks.travels)
    needed, roots = closure([v for v in wanted if v not in given], _without(blocks, given))
    of_blocks = {s.leaf: s.layer_dim for s in blocks.stacked.values()} if end > first else {}
    used = [
        leaf for leaf in blocks.leaves if leaf in of_blocks or (leaf in roots and leaf not in given)
    ]
    numbers = {leaf: i for i, leaf in enumerate(blocks.leaves)}
    pieces = tuple(
        Piece(leaf=numbers[leaf], dim=of_blocks[leaf], layers=(first, end))
        if leaf in of_blocks
        else Piece(leaf=numbers[leaf])
        for leaf in used
    )
    num_leaves = len(blocks.leaves)

    def compute(leaves: Sequence[jax.Array], x: Any, batch: Any, key: jax.Array) -> Any:
        env: dict[Value, Any] = dict(zip(used, leaves, strict=True))
        env.update(zip(blocks.program.inputs[num_leaves:], jax.tree.leaves((batch, key))))
        if is_first:
            run(needed, env)
            carry = [read(env, a) for a in _carry_atoms(blocks)]
        else:
            num_carry = blocks.counts[1]
            carry = list(x[:num_carry])
            env.update(zip(blocks.travels, x[num_carry:], strict=True))
            run(needed, env)
        if end > first:
            carry = _loop(blocks, env, carry, first, end)
        if not is_last:
            return (*carry, *(env[v] for v in blocks.travels))
        env.update(zip(blocks.loop.outputs, carry))
        run(_dependents_of(blocks), env)
        outputs = [jnp.asarray(read(env, a)) for a in blocks.program.outputs]
        loss, metrics, _ = blocks.result.unflatten(outputs)
        return loss, metrics

    return Stage(pieces=pieces, run=compute, is_first=is_first, is_last=is_last)


def _loop(
    blocks: Blocks, env: Mapping[Value, Any], carry: list[Any], first: int, end: int
) -> list[Any]:
    """Run the blocks from `first` to `end`; the leaves of `env` hold these alone."""
    num_consts, num_carry = blocks.counts
    start = num_consts + num_carry
    body, _ = loop_body(blocks.loop, blocks.stacked)
    consts = [read(env, a) for a in blocks.loop.inputs[:num_consts]]
    xs = []
    for i, atom in enumerate(blocks.loop.inputs[start:], start):
        if i in blocks.stacked:
            chain = blocks.stacked[i]
            xs.append(jnp.moveaxis(env[chain.leaf], chain.layer_dim, 0))
        else:
            xs.append(lax.slice_in_dim(read(env, atom), first, end))

    def turn(carry: list[Any], x: list[Any]) -> tuple[list[Any], None]:
        return body(*consts, *carry, *x)[:num_carry], None

    return lax.scan(turn, carry, xs, length=end - first)[0]


def _stacked(
    eq: Equation, producers: Mapping[Value, Equation], leaves: Sequence[Value]
) -> dict[int, Stacked]:
    num_consts, num_carry = compat.scan_counts(eq.params)
    start = num_consts + num_carry
    whole = dict.fromkeys(leaves)
    found = ((i, find_stacked(a, producers, whole)) for i, a in enumerate(eq.inputs[start:], start))
    return {i: stacked for i, stacked in found if stacked is not None}


def _check_loop(loop: Equation, program: Program) -> None:
    num_carry = compat.scan_counts(loop.params)[1]
    read_later = {v for eq in program.equations for v in eq.values} | set(program.outputs)
    if any(v in read_later for v in loop.outputs[num_carry:]):
        raise ValueError(
            "the loop over blocks returns something of each block (its ys), which later layers "
            "read; carry it through the blocks, or give the layers as zeroxla.Pipeline([...], loss)"
        )
    if loop.params.get("reverse"):
        raise ValueError("the loop over blocks runs in reverse; a pipeline runs forward")


def _carry_atoms(blocks: Blocks) -> tuple[Atom, ...]:
    num_consts, num_carry = blocks.counts
    return blocks.loop.inputs[num_consts : num_consts + num_carry]


def _carried(blocks: Blocks) -> list[Value]:
    return [a for a in _carry_atoms(blocks) if isinstance(a, Value)]


def _beside(blocks: Blocks) -> list[Value]:
    """What the loop reads besides its carry and the stacked leaves."""
    num_consts, num_carry = blocks.counts
    return [
        a
        for i, a in enumerate(blocks.loop.inputs)
        if isinstance(a, Value)
        and i not in blocks.stacked
        and not num_consts <= i < num_consts + num_carry
    ]


def _read_last(blocks: Blocks) -> list[Value]:
    """What the equations after the loop read that was made before it."""
    after = _dependents_of(blocks)
    made = {v for eq in after for v in eq.outputs} | set(blocks.loop.outputs)
    values = [v for eq in after for v in eq.values]
    values += [a for a in blocks.program.outputs if isinstance(a, Value)]
    return list(dict.fromkeys(v for v in values if v not in made))


def _dependents_of(blocks: Blocks) -> list[Equation]:
    return _dependents(blocks.program.equations, blocks.loop.outputs)


def _dependents(equations: Sequence[Equation], values: Sequence[Value]) -> list[Equation]:
    """Return the equations that depend on values, in order."""
    reached, found = set(values), []
    for eq in equations:
        if not reached.isdisjoint(eq.values):
            reached.update(eq.outputs)
            found.append(eq)
    return found


def _activations(program: Program, leaves: Sequence[Value]) -> set[Value]:
    """Return the values that depend on leaves and on the batch or the key."""
    on_leaves, on_data = set(leaves), set(program.inputs) - set(leaves)
    for eq in program.equations:
        for known in (on_leaves, on_data):
            if not known.isdisjoint(eq.values):
                known.update(eq.outputs)
    return on_leaves & on_data


def _without(blocks: Blocks, given: set[Value]) -> dict[Value, Equation]:
    return {v: eq for v, eq in blocks.known.items() if v not in given}


def _roots(blocks: Blocks, values: Sequence[Value]) -> set[Value]:
    """Return the leaves that values depend on."""
    return set(closure(list(values), blocks.known)[1]) & set(blocks.leaves)
