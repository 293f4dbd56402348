"""Backward of a segment that keeps no leaf: residuals that depend on leaves alone are computed
again from leaves that are gathered again, and of the others some values are kept.

`jax.vjp` of a segment is traced into one program (see traced_segment.py), and each residual is
traced back in it. A residual that depends on leaves and constants alone (a leaf, its cast, its
transpose) is recomputed in backward. One that is an input or output of the segment is kept by
reference. The others, which are activations, are saved, unless a `Kept` says which values are saved
instead: backward then computes the residuals from these. So each value is saved once, and it is
known exactly which leaves backward reads: no bias, no embedding table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.fetch.barriers import with_barriers
from zeroxla.fetch.ties import tie
from zeroxla.fetch.traced_segment import TracedSegment
from zeroxla.offload.memory_kinds import to_device, to_host
from zeroxla.program.trace import Equation, Operand, Program, Value, closure, read, run


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The values of a traced segment that forward keeps, beside its inputs.

    Attributes:
      on_device: the values that stay on the device.
      on_host: the values that wait in the host's memory.
    """

    on_device: frozenset[Value] = frozenset()
    on_host: frozenset[Value] = frozenset()

    @property
    def values(self) -> frozenset[Value]:
        return self.on_device | self.on_host


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Linearized:
    """A segment's forward and backward, and the values that backward reads.

    Attributes:
      leaves: the leaves that backward gathers.
      references: the segment's inputs and outputs that backward reads.
      outputs: the segment's outputs that have a gradient.
      targets: the leaves and inputs that get a gradient.
      saved: the values, of the traced program, that forward keeps for backward.
      on_host: those of them that wait in the host's memory.
    """

    leaves: tuple[Value, ...]
    references: tuple[Value, ...]
    outputs: tuple[Value, ...]
    targets: tuple[Value, ...]
    saved: tuple[Value, ...]
    on_host: frozenset[Value]

    _forward: Callable[..., list[jax.Array]]
    _evaluate: Callable[..., list[jax.Array]]
    _stand_ins: dict[Value, Value]  # the segment's value -> the traced program's
    _recompute: tuple[Equation, ...]
    _late: tuple[Value, ...]  # what activations are computed again from
    _residuals: tuple[Operand, ...]
    _pullback: Any

    def forward(self, args: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """Return the segment's outputs, and the values saved for backward.

        Args:
          args: the segment's leaves and then its inputs.
        """
        results = self._forward(*args)
        num_outputs = len(results) - len(self.saved)
        saved = zip(self.saved, results[num_outputs:], strict=True)
        return results[:num_outputs], tuple(
            to_host(x) if v in self.on_host else x for v, x in saved
        )

    def evaluate(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the segment's outputs without a derivative: no custom rule runs."""
        return self._evaluate(*args)

    def backward(
        self,
        leaves: Mapping[Value, jax.Array],
        references: Mapping[Value, jax.Array],
        saved: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
    ) -> dict[Value, jax.Array]:
        """Return the cotangent of each of `targets`.

        Args:
          leaves: the gathered leaves, whole.
          references: the inputs and outputs that backward reads.
          saved: the values that forward saved.
          cotangents: the cotangents of `outputs`.
        """
        env = {self._stand_ins[v]: leaves[v] for v in self.leaves}
        env.update((self._stand_ins[v], references[v]) for v in self.references)
        env.update(zip(self.saved, map(to_device, saved), strict=True))
        # Without the tie XLA takes what forward computed, which then stays until now.
        tied, cotangents = tie([env[v] for v in self._late], cotangents, by_data=False)
        env.update(zip(self._late, tied, strict=True))
        run(self._recompute, env)
        # A custom rule may index its residuals with traced numbers, as no NumPy constant can be.
        residuals = [jnp.asarray(read(env, a)) for a in self._residuals]
        pullback = jax.tree.unflatten(self._pullback, residuals)
        (cotangents,) = pullback(list(cotangents))
        return dict(zip(self.targets, cotangents, strict=True))


def linearize(traced: TracedSegment, kept: Kept | None = None) -> Linearized:
    """Make the forward and backward of a segment.

    Args:
      traced: the segment with its derivative.
      kept: what forward keeps beside the segment's inputs. Each residual must follow from it, from
        inputs and from leaves. None keeps every residual that is an activation.
    """
    segment, program = traced.segment, traced.program
    # What others read after the segment is kept by reference, like its inputs.
    results = {
        v: r for v, r in zip(segment.outputs, traced.results, strict=True) if isinstance(r, Value)
    }
    stand_ins = results | traced.stand_ins
    if kept is None:
        kept = Kept(on_device=all_residuals(traced))
    producers = {v: eq for v, eq in traced.producers().items() if v not in kept.values}
    wanted = [v for v in traced.residuals if isinstance(v, Value)]
    recompute, roots = closure(wanted, producers)
    missing = [v for v in roots if v not in kept.values and v not in program.inputs]
    assert not missing, f"residuals need values that are not kept: {missing}"
    given = {*roots}
    shared = {r: v for v, r in results.items() if r not in kept.on_host}
    saved = tuple(v for v in roots if v in kept.values and v not in shared)
    from_free = traced.from_free()
    late = dict.fromkeys(
        v
        for eq in recompute
        if not from_free.issuperset(eq.outputs)
        for v in eq.values
        if v in given and v not in from_free
    )
    forward = Program(
        tuple(stand_ins[v] for v in (*segment.leaves, *segment.inputs)),
        program.equations,
        (*traced.results, *saved),
    )
    evaluate = Program((*segment.leaves, *segment.inputs), segment.equations, segment.outputs)
    return Linearized(
        leaves=tuple(v for v in segment.leaves if stand_ins[v] in given),
        references=(
            *(v for v in segment.inputs if stand_ins[v] in given),
            *(v for r, v in shared.items() if r in given and r not in program.inputs),
        ),
        outputs=traced.outputs,
        targets=traced.targets,
        saved=saved,
        on_host=kept.on_host,
        _forward=with_barriers(forward, [stand_ins[v] for v in segment.leaves]),
        _evaluate=with_barriers(evaluate, segment.leaves),
        _stand_ins=stand_ins,
        _recompute=tuple(recompute),
        _late=tuple(late),
        _residuals=traced.residuals,
        _pullback=traced.pullback,
    )


def all_residuals(traced: TracedSegment) -> frozenset[Value]:
    """Return the residuals that are neither inputs nor computed from leaves and constants alone."""
    known = traced.from_free().union(traced.program.inputs)
    return frozenset(v for v in traced.residuals if isinstance(v, Value) and v not in known)
