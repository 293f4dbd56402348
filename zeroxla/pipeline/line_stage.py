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
from zeroxla.pipeline.line import BlockLoop, Line, NewState, length_of
from zeroxla.pipeline.stage import Stage, StateShare
from zeroxla.program.paths import Path
from zeroxla.program.stacked_scan import Stacked, loop_body
from zeroxla.program.trace import Equation, Operand, Value, closure, read, run


def make_stage(line: Line, start: int, end: int, state_paths: Sequence[Path]) -> Stage:
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Turns:
    """Some turns of a loop.

    Attributes:
      loop: the loop.
      first, end: the first turn, and the one after the last.
    """

    loop: BlockLoop
    first: int
    end: int

    @property
    def blocks(self) -> tuple[int, int]:
        """The first block of these turns, and the one after the last."""
        if not self.loop.scan.reverse:
            return self.first, self.end
        return self.loop.scan.length - self.end, self.loop.scan.length - self.first

    @property
    def is_end(self) -> bool:
        """Whether the loop ends with these turns."""
        return self.end == self.loop.scan.length


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

    line: Line
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.line.length

    @functools.cached_property
    def parts(self) -> list[Equation | _Turns]:
        """The equations and the turns of loops in the stretch."""
        found: list[Equation | _Turns] = []
        for part, at in zip(self.line.parts, self.line.starts):
            first, end = max(self.start - at, 0), min(self.end - at, length_of(part))
            if first < end:
                found.append(_Turns(part, first, end) if isinstance(part, BlockLoop) else part)
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
            wanted += (a for _, a in _plain_xs(part.loop))
        wanted += self.line.outputs if self.is_last else ()
        wanted += (self.line.new_state[i].operand for i in self._free_state)
        values = [a for a in wanted if isinstance(a, Value) and a not in self.line.made]
        equations, roots = closure(values, self.line.makers)
        return equations, set(roots)

    @functools.cached_property
    def pieces(self) -> tuple[LeafPiece, ...]:
        """The pieces of leaves that the stretch reads."""
        leaves = set(self.line.leaves)
        found = {LeafPiece(leaves=(self._number(v),)): None for v in self.known[1] & leaves}
        for part in self.parts:
            if isinstance(part, _Turns):
                for stacked in part.loop.stacked.values():
                    piece = self._piece(part, stacked, self.line.leaves)
                    found.update({piece: None} if piece is not None else {})
        return tuple(sorted(found, key=lambda x: (x.leaves, x.layers, x.is_stack)))

    @functools.cached_property
    def _numbers(self) -> dict[Value, int]:
        return {v: i for of in (self.line.leaves, self.line.state) for i, v in enumerate(of)}

    def _number(self, value: Value) -> int:
        return self._numbers[value]

    def _piece(
        self, turns: _Turns, stacked: Stacked | tuple[Value, ...], among: Sequence[Value]
    ) -> LeafPiece | None:
        """Return the piece that turns of a loop read of an operand; None for other arrays."""
        first, end = turns.blocks
        if isinstance(stacked, Stacked):
            if stacked.leaf not in among:
                return None
            number = self._number(stacked.leaf)
            return LeafPiece(leaves=(number,), dim=stacked.layer_dim, layers=(first, end))
        mine = stacked[first:end]
        if any(v not in among for v in mine):
            return None
        return LeafPiece(leaves=tuple(map(self._number, mine)), is_stack=True)

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
        turns: _Turns,
        env: _Env,
        pieces: Mapping[LeafPiece, jax.Array],
        state: Sequence[jax.Array],
    ) -> None:
        """Run turns of a loop, and write what they make to `env`."""
        loop, (first, end) = turns.loop, turns.blocks
        scan = loop.scan
        chains = {i: x for i, x in loop.stacked.items() if isinstance(x, Stacked)}
        body, _ = loop_body(scan, chains)
        xs: dict[int, jax.Array] = {}
        for i, stacked in loop.stacked.items():
            piece = self._piece(turns, stacked, self.line.leaves)
            if piece is not None:
                array = pieces[piece]
            else:
                piece = self._piece(turns, stacked, self.line.state)
                assert piece is not None, "a loop slices neither leaves nor state"
                array = piece.cut(state)
            xs[i] = array if piece.dim is None else jnp.moveaxis(array, piece.dim, 0)
        for i, operand in _plain_xs(loop):
            xs[i] = lax.slice_in_dim(jnp.asarray(read(env.values, operand)), first, end)
        carries, ys = scan.split_outputs(loop.outputs)
        if turns.first == 0:
            carry = [jnp.asarray(read(env.values, a)) for a in scan.carry]
        else:
            carry = [env.partial[v] for v in carries]
        consts = [read(env.values, a) for a in scan.consts]

        def turn(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            carry, ys = scan.split_outputs(body(*consts, *carry, *x))
            return list(carry), list(ys)

        ordered = [xs[i] for i in sorted(xs)]
        carry, made = scan.run(turn, carry, ordered, length=turns.end - turns.first)
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
            if isinstance(part, _Turns)
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
            elif self.start < self.line.made.get(new.operand, 0) <= self.end:
                found.append(StateShare(i))
        return tuple(found)

    def check_state(self, paths: Sequence[Path]) -> None:
        """Check that the stretch makes the new value of all the state that it reads.

        Args:
          paths: the paths of the state's leaves.

        Raises:
          NotImplementedError: another stage makes it.
        """
        state = self.line.state
        reads = [LeafPiece(leaves=(self._number(v),)) for v in self.known[1].intersection(state)]
        for part in self.parts:
            if isinstance(part, _Turns):
                found = (self._piece(part, x, state) for x in part.loop.stacked.values())
                reads += [piece for piece in found if piece is not None]
        whole = {share.leaf for share in self.keeps if share.rows is None}
        rows = {(share.leaf, share.rows) for share in self.keeps}
        for piece in reads:
            for i in piece.leaves:
                is_new = self.line.new_state[i].operand is not state[i]
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


def _plain_xs(loop: BlockLoop) -> list[tuple[int, Operand]]:
    """Return the sliced operands of a loop that are no leaves and no state, by position."""
    operands = enumerate(loop.scan.xs, loop.scan.first_x)
    return [(i, a) for i, a in operands if i not in loop.stacked]
