"""Forwards and backwards of stages in several calls, each of which leaves something to the next.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from zeroxla.pipeline.split_call import SplitCall
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing


class AtOnce(NamedTuple):
    """What a backward gives beside the gradients of leaves.

    Attributes:
      of_inputs: the gradients of the stage's floating inputs.
      sums: the weighted sums of loss and metrics, of a last stage that runs forward in its backward
        alone; else None.
      state: of such a stage the new model state; else [].
    """

    of_inputs: list[jax.Array]
    sums: Any
    state: list[jax.Array]


Backward = Callable[..., tuple[AtOnce, list[jax.Array]]]
"""(arguments of `StageProgram.backward`) -> (what is given at once, gradients of the leaves). Where
the forward has left a tape, it is the last argument."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCalls:
    """The calls in which stages run.

    Attributes:
      backwards: the whole backward of each stage.
      forwards: the forward of each stage, if backwards take what it has left and do not run it
        again. It returns the stage's outputs, and of the last stage `AtOnce.sums`, and the state.
      splits: the backward of each stage in two calls, if the schedule splits backwards: the
        gradients of its inputs, and those of its leaves. The first stage has no gradients of
        inputs; its first call takes the gradient through its layers all the same, so that both are
        about as long as in other stages.
      tapes: packs what the forward of each stage but the last leaves to its backward.
      last_tape: packs what the forward of the last stage leaves.
      kept: packs what the backward of each stage leaves to its weight gradient.
    """

    backwards: Sequence[Backward]
    forwards: Sequence[SplitCall] = ()
    splits: Sequence[SplitCall] = ()
    tapes: Packing = dataclasses.field(default_factory=lambda: make_packing([()]))
    last_tape: Packing = dataclasses.field(default_factory=lambda: make_packing([()]))
    kept: Packing = dataclasses.field(default_factory=lambda: make_packing([()]))

    @staticmethod
    def make(
        programs: Sequence[StageProgram],
        without_ties: Sequence[StageProgram],
        arguments: Sequence[tuple[Any, ...]],
        by_data: str | None,
        *,
        tapes: bool,
        splits: bool,
    ) -> StageCalls:
        """Trace the calls.

        Args:
          programs: the program of each stage.
          without_ties: the same, whose own ties are none by data.
          arguments: the shapes of each stage's arguments of `StageProgram.backward`.
          by_data: as in `SplitProgram`.
          tapes: whether forwards leave a tape.
          splits: whether the schedule splits backwards.
        """
        backwards = [_whole(program) for program in programs]
        if not tapes and not splits:
            return StageCalls(backwards=backwards)
        forwards, halves = [], []
        for stage, (program, args) in enumerate(zip(without_ties, arguments, strict=True)):
            backward, tape = _whole(program), ()
            if tapes:
                num = len(args)  # the gradients and the loss scale are the last arguments
                unknown = (num - 2, num - 1)
                call = SplitCall.make(_forward_first(program), args, by_data, unknown=unknown)
                forwards.append(call)
                backwards[stage] = backward = _after(call)
                tape = (list(call.kept),)
            if splits:
                halves.append(SplitCall.make(backward, (*args, *tape), by_data, early=True))
        return StageCalls(
            backwards=backwards,
            forwards=forwards,
            splits=halves,
            tapes=make_packing([call.kept for call in forwards[:-1]] or [()]),
            last_tape=make_packing([call.kept for call in forwards[-1:]] or [()]),
            kept=make_packing([call.kept for call in halves] or [()]),
        )


def _whole(program: StageProgram) -> Backward:
    """Return a stage's backward that runs the forward again."""

    def backward(*args: Any) -> tuple[AtOnce, list[jax.Array]]:
        found = program.backward(*args)
        state = found.state if program.stage.is_last else []
        return AtOnce(found.of_inputs, found.sums, state), found.of_leaves

    return backward


def _forward_first(program: StageProgram) -> Callable[..., Any]:
    """Return a stage's forward and backward, which is to be split between them."""

    def run(*args: Any) -> tuple[Any, Any]:
        found = program.backward(*args)
        outputs = [] if program.stage.is_last else found.outputs
        return (outputs, found.sums, found.state), (found.of_inputs, found.of_leaves)

    return run


def _after(forward: SplitCall) -> Backward:
    """Return a stage's backward that takes the tape of its forward."""

    def backward(*args: Any) -> tuple[AtOnce, list[jax.Array]]:
        *known, tape = args
        of_inputs, of_leaves = forward.second(known, tape)
        return AtOnce(of_inputs, None, []), of_leaves

    return backward
