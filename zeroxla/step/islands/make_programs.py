"""`programs_of`: cuts a step's parameters into fragments, and makes their programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zeroxla.step.describe import Description
from zeroxla.step.islands.exchange_programs import ExchangePrograms
from zeroxla.step.islands.fragments import cut_by_units, cut_fragments
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.islands.outer_state import FragmentState
from zeroxla.step.state import TrainState, state_shardings
from zeroxla.step.step import Step


def programs_of(step: Step, shapes: TrainState | None = None) -> tuple[OuterPrograms, ...]:
    """Return the programs of each fragment of a step's parameters.

    Args:
      step: a step with `outer` in its config.
      shapes: the shapes of its state; None takes those of the batch that it has seen.

    Raises:
      ValueError: it has seen none, or there are more fragments than elements or steps.
    """
    outer, shapes = step.config.outer, step.shapes() if shapes is None else shapes
    assert outer is not None
    shardings = jax.tree.leaves(state_shardings(shapes, step.mesh).params)
    layout = step.programs.layout_of(shapes.params, shapes.placements[0])
    leaves = zip(layout.leaves, shardings, jax.tree.leaves(shapes.params), strict=True)
    own = [None if leaf.frozen else s.shard_shape(x.shape) for leaf, s, x in leaves]
    if outer.fragments == "units":
        fragments = cut_by_units(own, units_of(step))
    else:
        fragments = cut_fragments(own, outer.fragments)
    outer = dataclasses.replace(outer, fragments=len(fragments))
    made: dict[tuple[int, int], ExchangePrograms] = {}
    return tuple(
        OuterPrograms(
            outer=outer,
            mesh=step.mesh,
            shardings={i: shardings[i] for i in fragment.leaves},
            fragment=fragment,
            _made=made,
        )
        for fragment in fragments
    )


def begin(programs: Sequence[OuterPrograms], params: Any) -> tuple[FragmentState, ...]:
    """Return the states of all fragments before the first exchange, from the parameters."""
    leaves = {i: x for p in programs for i, x in p.leaves_of(params).items()}
    specs = {i: spec for p in programs for i, spec in p.specs.items()}
    outs = [p.state_specs for p in programs]
    run = programs[0].compiled(lambda shards: [p.begun(shards) for p in programs], (specs,), outs)
    store = jax.jit(lambda states: [p.stored(x) for p, x in zip(programs, states, strict=True)])
    return tuple(store(run(leaves)))


def units_of(step: Step) -> list[str]:
    """Return the name of the unit of each leaf's gather.

    Raises:
      ValueError: the step is a pipeline's, which has no units.
    """
    description = step.describe()
    if not isinstance(description, Description):
        raise ValueError(
            'Outer(fragments="units") and a pipeline, whose stages gather no units; give a number '
            "of fragments"
        )
    return [row.unit for row in description.rows]
