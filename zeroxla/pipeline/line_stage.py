"""A stretch of a line as the stage of a pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.pipeline.line import BlockLoop, LossLine, NewState, length_of
from zeroxla.pipeline.loop_turns import LoopTurns
from zeroxla.pipeline.stage import Stage, StateShare
from zeroxla.program.paths import Path
from zeroxla.program.trace import Equation, Operand, Value, closure, read, run


def make_stage(line: LossLine, start: int, end: int, state_paths: Sequence[Path]) -> Stage:
    """Return the stage that runs a line from the place `start` to the place `end`.

    Args:
      line, start, end: the line, and the places.
      state_paths: the paths of the leaves of the model state, for errors.

    Raises:
      NotImplementedError: the stage reads state that another one changes.
    """
    stretch = _Stretch(line, start, end)
    stretch.check_state(state_paths)
    return Stage(
        pieces=stretch.pieces,
        run=stretch.run,
        is_first=start == 0,
        is_last=end == line.length,
        keeps=stretch.keeps,
    )


class _Env(NamedTuple):
    """The arrays that a run of a stretch knows.

    Attributes:
      values: by value, those that are complete.
      partial: by result of a loop that has not ended, its carry and the results of its turns so
        far.
      blocks: by stacked result of a loop, the first block that was run here, and what these blocks
        made.
    """

    values: dict[Value, Any]
    partial: dict[Value, jax.Array]
    blocks: dict[Any, tuple[int, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Stretch:
    """The stretch of a line from one place to another."""

    line: LossLine
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.line.length

    @functools.cached_property
    def parts(self) -> list[Equation | LoopTurns]:
        """The equations and the turns of loops in the stretch."""
        found: list[Equation | LoopTurns] = []
        for part, at in zip(self.line.parts, self.line.starts):
            first, end = max(self.start - at, 0), min(self.end - at, length_of(part))
            if first < end:
                found.append(LoopTurns(part, first, end) if isinstance(part, BlockLoop) else part)
        return found

    @functools.cached_property
    def known(self) -> tuple[list[Equation], set[Value]]:
        """The equations of values without a place that the stretch reads, and what they read."""
        wanted: list[Operand] = []
        for part in self.parts:
            if isinstance(part, Equation):
                wanted += part.inputs
                continue
            scan = part.loop.scan
            wanted += scan.consts
            wanted += () if part.first else scan.carry
            wanted += (a for _, a in part.plain_xs)
        wanted += self.line.outputs if self.is_last else ()
        wanted += (self.line.new_state[i].operand for i in self._free_state)
        values = [a for a in wanted if isinstance(a, Value) and a not in self.line.made]
        equations, roots = closure(values, self.line.makers)
        return equations, set(roots)

    @functools.cached_property
    def leaf_numbers(self) -> dict[Value, int]:
        return {v: i for i, v in enumerate(self.line.leaves)}

    @functools.cached_property
    def state_numbers(self) -> dict[Value, int]:
        return {v: i for i, v in enumerate(self.line.state)}

    @functools.cached_property
    def pieces(self) -> tuple[LeafPiece, ...]:
        """The pieces of leaves that the stretch reads."""
        return self._pieces(self.leaf_numbers)

    def _pieces(self, numbers: Mapping[Value, int]) -> tuple[LeafPiece, ...]:
        """Return the pieces that the stretch reads of numbered arrays, in their order."""
        whole = (LeafPiece(leaves=(numbers[v],)) for v in self.known[1] if v in numbers)
        turns = (part for part in self.parts if isinstance(part, LoopTurns))
        sliced = (piece for part in turns for piece in part.pieces(numbers).values())
        return tuple(sorted({*whole, *sliced}, key=lambda x: (x.leaves, x.layers, x.is_stack)))

    def run(
        self,
        leaves: Sequence[jax.Array],
        x: Any,
        batch: Any,
        key: jax.Array,
        state: Sequence[jax.Array],
    ) -> tuple[Any, list[jax.Array]]:
        """Run the stretch; see `Stage.run`."""
        line = self.line
        pieces = dict(zip(self.pieces, leaves, strict=True))
        env = _Env(dict(zip(line.state, state, strict=True)), {}, {})
        for piece, array in pieces.items():
            if piece.dim is None and not piece.is_stack:
                env.values[line.leaves[piece.leaves[0]]] = array
        data = line.program.inputs[len(line.leaves) + len(line.state) :]
        env.values.update(zip(data, jax.tree.leaves((batch, key)), strict=True))
        for passed, array in zip(line.passed(self.start), x or (), strict=True):
            (env.values if passed.turns is None else env.partial)[passed.value] = array
        run(self.known[0], env.values)
        for part in self.parts:
            if isinstance(part, Equation):
                run([part], env.values)
            else:
                self._run_turns(part, env, pieces, state)
        new_state = [self._new_state(i, old, env) for i, old in enumerate(state)]
        if self.is_last:
            outputs = [jnp.asarray(read(env.values, a)) for a in line.outputs]
            loss, metrics, _ = line.result.unflatten([*outputs, *new_state])
            return (loss, metrics), new_state
        leaving = line.passed(self.end)
        arrays = (env.values[p.value] if p.turns is None else env.partial[p.value] for p in leaving)
        return tuple(arrays), new_state

    def _run_turns(
        self,
        turns: LoopTurns,
        env: _Env,
        pieces: Mapping[LeafPiece, jax.Array],
        state: Sequence[jax.Array],
    ) -> None:
        """Run turns of a loop, and write what they make to `env`."""
        scan, (first, end) = turns.loop.scan, turns.blocks
        xs = {i: pieces[piece] for i, piece in turns.pieces(self.leaf_numbers).items()}
        for i, piece in turns.pieces(self.state_numbers).items():
            xs[i] = piece.cut(state)
        for i, operand in turns.plain_xs:
            xs[i] = lax.slice_in_dim(jnp.asarray(read(env.values, operand)), first, end)
        carries, ys = scan.split_outputs(turns.loop.outputs)
        if turns.first == 0:
            carry = [jnp.asarray(read(env.values, a)) for a in scan.carry]
        else:
            carry = [env.partial[v] for v in carries]
        carry, made = turns.run([read(env.values, a) for a in scan.consts], carry, xs)
        place = env.values if turns.is_end else env.partial
        place.update(zip(carries, carry, strict=True))
        for y, mine in zip(ys, made, strict=True):
            env.blocks[y] = first, mine
            if y in self.line.needed:
                earlier = [env.partial[y]] if turns.first else []
                place[y] = lax.concatenate(
                    [mine, *earlier] if scan.reverse else [*earlier, mine], 0
                )

    # the state

    @functools.cached_property
    def _free_state(self) -> list[int]:
        """The leaves of the state whose new value follows from the model or the batch alone.

        Every stage computes it, or the last one if leaves of the model are needed for it.
        """
        line = self.line
        changed = (i for i, new in enumerate(line.new_state) if new.operand is not line.state[i])
        free = [i for i in changed if line.new_state[i].operand not in line.made]
        return [i for i in free if self.is_last or not self._reads_leaves(line.new_state[i])]

    def _reads_leaves(self, new: NewState) -> bool:
        values = [new.operand] if isinstance(new.operand, Value) else []
        return not set(self.line.leaves).isdisjoint(closure(values, self.line.makers)[1])

    @functools.cached_property
    def keeps(self) -> tuple[StateShare, ...]:
        """The parts of the model state whose new values the stretch makes."""
        rows = {
            y: part.blocks
            for part in self.parts
            if isinstance(part, LoopTurns)
            for y in part.loop.scan.split_outputs(part.loop.outputs)[1]
        }
        found = [StateShare(i) for i in self._free_state]
        for i, new in enumerate(self.line.new_state):
            if new.operand in rows:
                first, end = rows[new.operand]
                if new.block is None:
                    found.append(StateShare(i, (first, end)))
                elif first <= new.block < end:
                    found.append(StateShare(i))
            elif self._makes(new.operand):
                found.append(StateShare(i))
        return tuple(found)

    def _makes(self, operand: Operand) -> bool:
        """Whether an activation is made in the stretch."""
        made = self.line.made.get(operand, 0) if isinstance(operand, Value) else 0
        return self.start < made <= self.end

    def check_state(self, paths: Sequence[Path]) -> None:
        """Check that the stretch makes the new value of all the state that it reads.

        Args:
          paths: the paths of the state's leaves.

        Raises:
          NotImplementedError: another stage makes it.
        """
        whole = {share.leaf for share in self.keeps if share.rows is None}
        rows = {(share.leaf, share.rows) for share in self.keeps}
        for piece in self._pieces(self.state_numbers):
            for i in piece.leaves:
                is_new = self.line.new_state[i].operand is not self.line.state[i]
                if is_new and i not in whole and (i, piece.layers) not in rows:
                    raise NotImplementedError(
                        f"a stage reads {'/'.join(paths[i])!r} of the model's state, and a later "
                        "one changes it, so that no micro-batch could begin before the one before "
                        "it has ended; cut the model at another place (`partition`), or use pipe=1"
                    )

    def _new_state(self, i: int, old: jax.Array, env: _Env) -> jax.Array:
        """Return the new value of a leaf of the state, or the old one if another stage makes it."""
        new = self.line.new_state[i]
        for share in self.keeps:
            if share.leaf != i:
                continue
            if new.operand in env.blocks:
                first, made = env.blocks[new.operand]
                if new.block is not None:
                    return made[new.block - first]
                return lax.dynamic_update_slice_in_dim(old, made, first, 0)
            return jnp.asarray(read(env.values, new.operand))
        return old
